"""The exact gradient norm: the same bits whatever the order in which parameters are spread over stages."""

import math
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.optimizer import clip_grads, optimizer

from megatron_dyn.host import grad_norm
from megatron_dyn.host.grad_norm import exact_norm
from megatron_dyn.host.seams import apply

SQUARES = st.lists(st.floats(0.0, 1e70), max_size=40)


def gradients(seed, *, count=12, dtype=torch.float32):
    """Gradients whose sizes and magnitudes lie far apart, so that the order of a naive sum shows."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(1 + 37 * index, generator=generator) * 10.0 ** (index % 7 - 3)).to(dtype) for index in range(count)]


class TestExactNorm:
    @given(SQUARES, st.randoms(use_true_random=False))
    def test_it_does_not_depend_on_the_order(self, squares, random):
        shuffled = list(squares)
        random.shuffle(shuffled)
        assert exact_norm(shuffled) == exact_norm(squares)

    @given(st.lists(st.floats(0.0, 1e30), max_size=40))
    def test_it_is_the_fp64_norm_rounded_to_fp32(self, squares):
        assert exact_norm(squares) == np.float32(np.sqrt(math.fsum(squares)))

    @pytest.mark.parametrize("seed", range(5))
    def test_it_is_what_numpy_computes_in_fp64(self, seed):
        grads = gradients(seed)
        squares = [float(grad.double().square().sum()) for grad in grads]
        everything = np.concatenate([grad.double().numpy() for grad in grads])
        assert exact_norm(squares) == np.float32(np.linalg.norm(everything))

    @pytest.mark.parametrize("place", range(9))
    def test_small_squares_count_where_a_plain_sum_would_lose_them(self, place):
        # The large square alone has its root half way between two fp32 numbers. The small ones, each too small to
        # change it in fp64, decide for the upper; a plain sum loses those that come after the large one.
        middle = 1 + 2.0**-24
        small = [2.0**-53] * 8
        squares = [*small[:place], middle**2, *small[place:]]
        assert reduce(add, [middle**2, *small]) == middle**2
        assert exact_norm(squares) == 1 + 2.0**-23

    @pytest.mark.parametrize(
        ("squares", "expected"), [([], 0.0), ([0.0], 0.0), ([math.inf, 1.0], math.inf), ([9.0, 16.0], 5.0)]
    )
    def test_edges(self, squares, expected):
        assert exact_norm(squares) == expected

    def test_not_a_number_stays_that(self):
        assert math.isnan(exact_norm([1.0, math.nan]))


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
            expected = exact_norm([float(grad.double().square().sum()) for grad in grads])
            assert norm(grads) == norm(grads[::-1]) == expected
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
