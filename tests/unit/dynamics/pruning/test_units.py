"""Units of a weight: scores that order as magnitudes do, and masks that never let anything back in."""

import pytest
import torch

from megatron_dyn.dynamics.pruning.pattern import Pattern
from megatron_dyn.dynamics.pruning.units import GONE, mask_of, units_of

PATTERNS = ["unstructured", "rows", "2:4", "1:4", "block:2x4"]


def weight_of(seed=0, rows=6, columns=8, dtype=torch.float32):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(dtype)


def units(weight, mask, text):
    return units_of(weight, mask, Pattern.parse(text))


def all_true(weight):
    return torch.ones_like(weight, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scores_order_as_magnitudes_do(dtype):
    weight = weight_of(dtype=dtype)
    weight[0, :4] = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny, -torch.inf])
    scores = units(weight, all_true(weight), "unstructured").scores
    assert scores.dtype == torch.int32
    order = weight.float().abs().reshape(-1)
    assert torch.equal(scores[:, None] < scores, order[:, None] < order)
    assert int(scores.min()) == 0


def test_the_score_of_a_block_is_its_root_mean_square():
    weight = weight_of(rows=4, columns=8)
    scores = units(weight, all_true(weight), "block:2x4").scores.view(torch.float32)
    expected = [weight[i : i + 2, j : j + 4].double().square().mean().sqrt() for i in (0, 2) for j in (0, 4)]
    assert scores.tolist() == [float(value.float()) for value in expected]
    rows = units(weight, all_true(weight), "rows")
    assert rows.size == 8
    assert rows.scores.view(torch.float32).tolist() == [float(row.double().square().mean().sqrt().float()) for row in weight]


def test_the_score_of_a_group_is_that_of_what_it_would_lose():
    weight = torch.tensor([[3.0, -1.0, 2.0, 4.0, 0.0, 0.5, -0.5, 9.0]])
    found = units(weight, all_true(weight), "2:4")
    assert (found.size, found.num_weights) == (2, 4)
    assert found.scores.view(torch.float32).tolist() == pytest.approx([(5 / 2) ** 0.5, (0.25 / 2) ** 0.5])


@pytest.mark.parametrize("text", PATTERNS)
def test_what_went_is_gone_and_stays_hidden(text):
    pattern, weight = Pattern.parse(text), weight_of()
    first = units_of(weight, all_true(weight), pattern)
    kept = torch.arange(len(first.scores)) % 3 != 0
    mask = mask_of(kept, weight, all_true(weight), pattern)
    assert int((~mask).sum()) == int((~kept).sum()) * first.size
    # The values have changed meanwhile, those that are hidden as well: nothing of it may bring them back.
    later = weight_of(seed=1)
    second = units_of(later, mask, pattern)
    assert torch.equal(second.scores == GONE, ~kept)
    again = mask_of(torch.ones_like(kept), later, mask, pattern)
    assert torch.equal(again, mask)


def test_of_equal_magnitudes_the_first_of_a_group_stay():
    weight = torch.full((2, 4), -1.0)
    mask = mask_of(torch.zeros(2, dtype=torch.bool), weight, all_true(weight), Pattern.parse("2:4"))
    assert mask.tolist() == [[True, True, False, False]] * 2
