"""The exact gradient norm: the same bits whatever the layout, also where a rank holds flat pieces of parameters."""

import importlib
import math
from fractions import Fraction
from functools import reduce
from operator import add
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads, optimizer

from megatron_dyn.host import grad_norm
from megatron_dyn.host.grad_norm import exact_norm, exponent_of, sum_squares
from megatron_dyn.host.seams import apply
from megatron_dyn.testing.ranks import run_ranks

FINITE = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=60)
SMALL_BLOCKS = {"_ROW": 4, "_CPU_BLOCK": 8}
"""So few elements a row and a block that a handful of gradients fills several."""

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def gradients(seed, *, count=12, dtype=torch.float32):
    """Gradients whose sizes and magnitudes lie far apart, so that the order of a naive sum shows."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1 + 37 * index, generator=generator) * 10.0 ** (index % 7 - 3)).to(dtype) for index in range(count)]


def norm_of(*ranks):
    """The norm of what the ranks hold, each a list of tensors, without processes."""
    exponent = max(exponent_of(grads) for grads in ranks)
    return exact_norm(sum(sum_squares(grads, exponent) for grads in ranks), exponent)


def cut_and_deal(values, random):
    """Shuffle elements, cut them anywhere into pieces (some empty), and deal these to up to four ranks."""
    order = random.sample(range(len(values)), len(values))
    borders = sorted(random.choices(range(len(values) + 1), k=random.randrange(8)))
    ranks = [[] for _ in range(random.randrange(1, 5))]
    for piece in torch.tensor_split(values[order], borders):
        random.choice(ranks).append(piece)
    return ranks


def is_within_one_ulp(norm, square):
    below, above = (Fraction(float(np.nextafter(np.float32(norm), np.float32(side)))) for side in (0.0, np.inf))
    return below**2 <= square <= above**2


class TestTheSumDoesNotDependOnTheLayout:
    @PATIENT
    @given(FINITE, st.randoms(use_true_random=False))
    def test_any_cut_and_order_over_ranks_gives_the_same_bits(self, values, random):
        values = torch.tensor(values)
        with mock.patch.multiple(grad_norm, **SMALL_BLOCKS):
            assert norm_of(*cut_and_deal(values, random)) == norm_of([values])

    @PATIENT
    @given(FINITE)
    def test_rows_and_blocks_do_not_show_in_the_sum(self, values):
        values = torch.tensor(values)
        exponent = exponent_of([values])
        with mock.patch.multiple(grad_norm, **SMALL_BLOCKS):
            in_small_blocks = sum_squares([values], exponent)
        assert in_small_blocks == sum_squares([values], exponent)

    def test_sums_of_shards_add_up_where_fp64_sums_do_not(self):
        whole = torch.randn(1000, generator=torch.Generator().manual_seed(5))
        exponent = exponent_of([whole])
        naive, ours = set(), set()
        for border in range(0, len(whole), 20):
            shards = whole[:border], whole[border:]
            naive.add(math.fsum(float(shard.double().square().sum()) for shard in shards))
            ours.add(sum(sum_squares([shard], exponent) for shard in shards))
        assert len(naive) > 1
        assert len(ours) == 1

    @pytest.mark.parametrize("block", [grad_norm._CPU_BLOCK, grad_norm._GPU_BLOCK])
    def test_full_blocks_of_the_largest_gradients_are_still_summed_exactly(self, block):
        # Just below a power of two: as large as squares can get in units of the grid, and with odd numbers of them.
        below_one = torch.arange(block + 5) % 4099 + 1
        with mock.patch.object(grad_norm, "_CPU_BLOCK", block):
            grads = [1 - below_one * 2.0**-24]
            total = sum_squares(grads, exponent_of(grads))
        # (2**24 - b)**2, summed in whole numbers that fit into int64.
        expected = (len(below_one) << 48) - (int(below_one.sum()) << 25) + int(below_one.square().sum())
        assert Fraction(total, 1 << 83) == Fraction(expected, 1 << 48)


class TestTheNorm:
    @PATIENT
    @given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=60))
    def test_it_is_within_one_ulp_of_the_exact_one(self, values):
        square = sum(Fraction(value) ** 2 for value in values)
        exponent = exponent_of([torch.tensor(values)])
        total = sum_squares([torch.tensor(values)], exponent)
        unit = Fraction(2) ** (2 * exponent - 83)
        assert abs(total * unit - square) <= len(values) * unit / 2
        assert is_within_one_ulp(exact_norm(total, exponent), square)

    @pytest.mark.parametrize("seed", range(3))
    def test_it_is_what_numpy_computes_in_fp64(self, seed):
        grads = gradients(seed)
        everything = np.concatenate([grad.double().numpy() for grad in grads])
        assert norm_of(grads) == np.float32(np.linalg.norm(everything))

    @pytest.mark.parametrize("place", range(5))
    def test_small_squares_count_where_a_plain_sum_would_lose_them(self, place):
        # The first four alone have their norm half way between two fp32 numbers. The small ones, each too small to
        # change that in fp64, decide for the upper; a plain sum loses those that come after the large ones.
        large, small = [1.0, 2.0**-12, 2.0**-12, 2.0**-24], [2.0**-27] * 8
        middle = (1 + 2.0**-24) ** 2
        assert math.fsum(value**2 for value in large) == middle == reduce(add, [middle, *(value**2 for value in small)])
        assert norm_of([torch.tensor(large)]) == 1
        assert norm_of([torch.tensor([*large[:place], *small, *large[place:]])]) == 1 + 2.0**-23

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_gradients_of_lower_precision_are_taken_as_they_are(self, dtype):
        grads = gradients(4, dtype=dtype)
        assert norm_of(grads) == norm_of([grad.float() for grad in grads])
        assert norm_of([*grads, *gradients(5)]) == norm_of([*(grad.float() for grad in grads), *gradients(5)])

    def test_shapes_and_strides_do_not_matter(self):
        grad = torch.arange(-7.0, 8.0).reshape(3, 5)
        assert norm_of([grad.t(), torch.tensor(2.0)]) == norm_of([grad.flatten(), torch.tensor([2.0])])


class TestSpecialValues:
    @pytest.mark.parametrize(
        ("ranks", "expected"),
        [
            ([[]], 0.0),
            ([[torch.zeros(3)], []], 0.0),
            ([[torch.zeros(0)], [torch.tensor([3.0]), torch.zeros(0)], [torch.tensor([4.0])]], 5.0),
            ([[torch.full((4,), 2.0**-149)]], 2.0**-148),
            ([[torch.full((4,), 2.0**-149)], [torch.tensor([1.0])]], 1.0),
            ([[torch.full((5,), 2.0**127)]], math.inf),
            ([[torch.tensor([1.0, -math.inf])], [torch.ones(3)]], math.inf),
            ([[torch.tensor([2.0**600, 1.0], dtype=torch.float64)]], math.inf),
            ([[torch.tensor([2.0**-600, 0.0], dtype=torch.float64)]], 0.0),
        ],
    )
    def test_norms(self, ranks, expected):
        exponent = max(exponent_of(grads) for grads in ranks)
        total = sum(sum_squares(grads, exponent) for grads in ranks) if exponent < 1000 else 0
        assert exact_norm(total, exponent) == expected

    @pytest.mark.parametrize("size", [1, 2, 33, 1000])
    def test_not_a_number_wins_over_infinity_on_whatever_rank(self, size):
        spoilt = torch.ones(size)
        spoilt[size // 2] = math.nan
        ranks = [[torch.tensor([math.inf])], [torch.ones(2), spoilt], []]
        assert math.isnan(exact_norm(0, max(exponent_of(grads) for grads in ranks)))


def norms_over_ranks(rank_cases):
    """This rank's answers: over the whole world, and for the first case in a group without rank 0."""
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo")
    group = dist.new_group([1, 2])
    mine = [cases[dist.get_rank()] for cases in rank_cases]
    with apply([grad_norm.seam()]):
        norm = importlib.import_module("megatron.core.optimizer.optimizer").get_grad_norm_fp32
        answers = [norm(grads) for grads in mine]
        return answers, (norm(mine[0], 2.0, group) if dist.get_rank() else None)


def test_all_ranks_get_the_same_norm_also_those_without_gradients():
    whole = torch.cat(gradients(6))
    cases = [
        (*([piece] for piece in whole.tensor_split([100, 1000])),),
        ([], list(whole.tensor_split(7))[::-1], []),
        ([], [], []),
        ([torch.ones(2)], [], [torch.tensor([math.inf])]),
        ([torch.tensor([math.inf])], [torch.tensor([math.nan])], []),
    ]
    answers = run_ranks(norms_over_ranks, 3, cases)
    expected = [norm_of([whole]), norm_of([whole]), 0.0, math.inf]
    assert [norms[:4] for norms, _ in answers] == [expected] * 3
    assert all(math.isnan(norms[4]) for norms, _ in answers)
    assert [in_group for _, in_group in answers] == [None, norm_of([whole[100:]]), norm_of([whole[100:]])]


@pytest.mark.usefixtures("one_rank")
class TestSeam:
    @pytest.fixture
    def norm(self):
        """Megatron's function with the seam in force, under the name that its optimizer looks up."""
        with apply([grad_norm.seam()]):
            yield optimizer.get_grad_norm_fp32

    def test_it_is_the_exact_norm_and_a_plain_float_for_any_order_and_dtype(self, norm):
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            grads = gradients(1, dtype=dtype)
            assert norm(grads) == norm(grads[::-1]) == norm_of(grads)
            assert isinstance(norm(grads), float)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_gradients_stay_as_they_are(self, norm, dtype):
        grads = gradients(2, dtype=dtype)
        before = [grad.clone() for grad in grads]
        norm(grads)
        assert all(torch.equal(grad, old) for grad, old in zip(grads, before, strict=True))

    def test_a_single_tensor_and_none_at_all_are_allowed(self, norm):
        assert norm(torch.tensor([3.0, 4.0])) == 5.0
        assert norm([]) == 0.0

    def test_with_a_tensor_kernel_the_answer_is_a_tensor_as_from_the_original(self, norm, monkeypatch):
        monkeypatch.setattr(clip_grads, "multi_tensor_scale_tensor_impl", object())
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        answer = norm([torch.tensor([3.0, 4.0])])
        assert (answer.tolist(), answer.dtype, answer.shape) == ([5.0], torch.float32, (1,))

    def test_other_norms_are_left_to_megatron(self, cpu_platform, norm):
        assert norm([torch.tensor([3.0, -4.0])], norm_type=math.inf) == 4.0

    def test_it_agrees_with_megatron_but_for_rounding(self, cpu_platform, norm):
        grads = gradients(3)
        assert norm(grads) == pytest.approx(float(clip_grads.get_grad_norm_fp32(grads)), rel=1e-5)

    def test_without_the_seam_megatron_has_its_own_again(self):
        before = optimizer.get_grad_norm_fp32
        with apply([grad_norm.seam()]):
            assert optimizer.get_grad_norm_fp32 is not before
        assert optimizer.get_grad_norm_fp32 is before
