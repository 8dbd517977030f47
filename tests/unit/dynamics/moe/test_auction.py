"""The auction: exactly balanced, within epsilon of the best there is, and the same every time."""

import itertools

import pytest
import torch

from megatron_dyn.dynamics.moe.auction import EPSILON_OF_SPREAD, balanced_assignment
from megatron_dyn.ports import JobError


def random_scores(num_tokens, num_experts, seed=0, scale=1.0):
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(seed)) * scale


def best_possible(scores):
    """The greatest sum over all balanced assignments, by trying them all."""
    num_tokens, num_experts = scores.shape
    places = [expert for expert in range(num_experts) for _ in range(num_tokens // num_experts)]
    rows = scores.double().tolist()
    return max(
        sum(row[expert] for row, expert in zip(rows, order, strict=True)) for order in set(itertools.permutations(places))
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(6, 2), (8, 4), (6, 3), (5, 5)])
def test_one_expert_a_token_is_the_best_assignment_within_epsilon(num_tokens, num_experts, seed):
    scores = random_scores(num_tokens, num_experts, seed)
    assigned = balanced_assignment(scores, 1)
    spread = float(scores.max() - scores.min())
    got = float((scores.double() * assigned).sum())
    assert best_possible(scores) - num_tokens * EPSILON_OF_SPREAD * spread <= got <= best_possible(scores) + 1e-9


@pytest.mark.parametrize(("num_tokens", "num_experts", "topk"), [(64, 8, 1), (64, 8, 3), (12, 4, 4), (30, 5, 2), (4, 1, 1)])
@pytest.mark.parametrize("kind", ["random", "alike", "skewed", "infinite"])
def test_the_balance_is_exact(num_tokens, num_experts, topk, kind):
    scores = random_scores(num_tokens, num_experts)
    if kind == "alike":
        scores = torch.zeros_like(scores)
    elif kind == "skewed":
        # Everybody wants expert 0.
        scores[:, 0] += 100.0
    elif kind == "infinite":
        scores[0, 0], scores[1, -1] = torch.inf, torch.nan
    assigned = balanced_assignment(scores, topk)
    assert assigned.sum(dim=1).tolist() == [topk] * num_tokens
    assert assigned.sum(dim=0).tolist() == [num_tokens * topk // num_experts] * num_experts


def test_it_is_the_same_every_time_and_takes_half_precision():
    scores = random_scores(48, 6, seed=3).bfloat16()
    assert torch.equal(balanced_assignment(scores, 2), balanced_assignment(scores.clone(), 2))


def test_tokens_that_cannot_be_shared_out_are_refused():
    with pytest.raises(JobError, match="multiples of the 4 experts, got 6"):
        balanced_assignment(random_scores(6, 4), 1)
