"""The meter: every training forward once, and nothing else."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_dyn.dynamics.moe.meter import LoadMeter

NUM_EXPERTS, TOPK = 3, 2


class Router(torch.nn.Module):
    """Routes as its logits say, top-k, with the gates of a softmax."""

    def forward(self, logits, padding_mask=None):
        gates = torch.softmax(logits, dim=-1)
        routed = torch.zeros_like(logits, dtype=torch.bool).scatter(1, logits.topk(TOPK, dim=1).indices, True)
        return gates * routed, routed


class Mlp(torch.nn.Module):
    """The parts of a MoE layer that a meter looks at."""

    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(num_moe_experts=NUM_EXPERTS, moe_router_topk=TOPK)
        self.router, self.experts = Router(), torch.nn.Identity()

    def forward(self, logits, padding_mask=None):
        probs, routed = self.router(logits, padding_mask)
        self.experts(logits[routed.any(dim=1)])
        return probs.square().sum()


@pytest.fixture
def mlp():
    layer = Mlp()
    LoadMeter(num_experts=NUM_EXPERTS, topk=TOPK, padded=False, num_microbatches=4).watch(layer)
    return layer


def some_logits(seed=0, num_tokens=5):
    return torch.randn(num_tokens, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def plain_count(*batches):
    """Tokens by expert, counted one by one."""
    counts = [0] * NUM_EXPERTS
    for logits in batches:
        for row in logits.tolist():
            for expert in sorted(range(NUM_EXPERTS), key=lambda e: -row[e])[:TOPK]:
                counts[expert] += 1
    return counts


def told(mlp):
    counts = mlp.dyn_loads.counts.tolist()
    return counts[:NUM_EXPERTS], counts[NUM_EXPERTS], counts[NUM_EXPERTS + 1]


def test_loads_are_those_of_a_plain_count(mlp):
    first, second = some_logits(0), some_logits(1, num_tokens=4)
    mlp(first)
    mlp(second)
    assert told(mlp) == (plain_count(first, second), 9 * TOPK, 0)
    assert mlp.dyn_loads.rows.tolist() == [5, 4, 0, 0]


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_recomputed_counts_once(mlp, reentrant):
    logits = some_logits()
    loss = checkpoint(mlp, logits, use_reentrant=reentrant)
    counted = told(mlp)
    loss.backward()
    assert logits.grad is not None
    assert told(mlp) == counted == (plain_count(logits), 5 * TOPK, 0)
    assert mlp.dyn_loads.rows.tolist() == [5, 0, 0, 0]


def test_evaluation_does_not_count(mlp):
    mlp.eval()
    mlp(some_logits())
    assert told(mlp) == ([0] * NUM_EXPERTS, 0, 0)
    assert mlp.dyn_loads.rows.tolist() == [0] * 4


def test_a_frozen_layer_counts_too(mlp):
    with torch.no_grad():
        mlp(some_logits())
    assert told(mlp)[0] == plain_count(some_logits())


def test_padding_does_not_count(mlp):
    logits = some_logits()
    padding = torch.tensor([[False], [False], [False], [True], [True]])
    mlp(logits, padding)
    assert told(mlp) == (plain_count(logits[:3]), 3 * TOPK, 0)


def test_places_that_are_filled_up_do_not_count_and_lost_tokens_do():
    meter = LoadMeter(num_experts=2, topk=1, padded=True, num_microbatches=1)
    layer = Mlp()
    meter.watch(layer)
    # Three tokens; the first two want expert 0, which took one; expert 1 was filled up with the second, at gate 0.
    probs = torch.tensor([[0.9, 0.0], [0.0, 0.0], [0.0, 0.7]])
    routed = torch.tensor([[True, False], [False, True], [False, True]])
    meter._routed(layer.router, (), {}, (probs, routed))
    assert meter.counts.tolist() == [1, 1, 3, 1]


def test_counting_goes_on_where_a_step_begins_and_starts_anew_when_cleared(mlp):
    mlp.dyn_loads.seek(2)
    mlp(some_logits())
    assert mlp.dyn_loads.rows.tolist() == [0, 0, 5, 0]
    mlp.dyn_loads.clear()
    assert told(mlp) == ([0] * NUM_EXPERTS, 0, 0)
    assert mlp.dyn_loads.rows.tolist() == [0] * 4


def test_what_is_counted_moves_with_the_layer_and_is_not_saved(mlp):
    assert {name for name, _ in mlp.named_buffers()} == {"dyn_loads.counts", "dyn_loads.rows"}
    assert mlp.state_dict() == {}
    assert mlp.bfloat16().dyn_loads.counts.dtype == torch.int64
