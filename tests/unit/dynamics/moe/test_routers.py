"""Each router against a plain reference of its method, token by token in fp64: map equal, gates and gradients to 1e-6."""

import math
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils.checkpoint import checkpoint

from megatron_dyn.dynamics.moe.routers import ExpertChoiceRouter, LossFreeRouter, SBaseRouter
from megatron_dyn.dynamics.moe.settings import Assignment
from megatron_dyn.ports import JobError

SEQUENCE, BATCH, NUM_EXPERTS = 6, 2, 4
NUM_TOKENS = SEQUENCE * BATCH
GROUPS = SimpleNamespace(tp=None, cp=None, tp_cp=None, tp_dp_cp=None)
TOLERANCE = {"rtol": 1e-6, "atol": 1e-6}


def build(kind, *, topk=2, config=None, **options):
    """A router of four experts, in training."""
    flags = {
        "num_layers": 1,
        "hidden_size": 8,
        "num_attention_heads": 1,
        "num_moe_experts": NUM_EXPERTS,
        "moe_ffn_hidden_size": 8,
        "moe_router_topk": topk,
        "moe_router_load_balancing_type": "none",
        "moe_router_pre_softmax": topk == 1,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
    }
    return kind(TransformerConfig(**flags | (config or {})), pg_collection=GROUPS, **options)


def some_logits(seed=0):
    logits = torch.randn(SEQUENCE, BATCH, NUM_EXPERTS, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.requires_grad_()


def same_as(router, reference, logits):
    """Route, and compare map, gates and the gradient of a weighted sum of the gates; returns the map."""
    weights = torch.linspace(-1, 1, NUM_TOKENS * NUM_EXPERTS).view(NUM_TOKENS, NUM_EXPERTS)
    probs, routed = router.routing(logits)
    (gradient,) = torch.autograd.grad((probs * weights).sum(), logits)
    plain = logits.detach().double().view(NUM_TOKENS, NUM_EXPERTS).requires_grad_()
    expected, chosen = reference(plain)
    (expected_gradient,) = torch.autograd.grad((expected * weights).sum(), plain)
    assert routed.dtype == torch.bool
    assert [row.nonzero().flatten().tolist() for row in routed] == [sorted(experts) for experts in chosen]
    torch.testing.assert_close(probs.double(), expected, **TOLERANCE)
    torch.testing.assert_close(gradient.double().view_as(plain), expected_gradient, **TOLERANCE)
    return routed


def softmax(row):
    powers = [value.exp() for value in row]
    return [power / sum(powers) for power in powers]


def sigmoid(row):
    return [1 / (1 + (-value).exp()) for value in row]


def table(rows):
    """Gates by token and expert as one matrix; what is not in a row is 0."""
    zero = torch.zeros((), dtype=torch.float64)
    return torch.stack([torch.stack([row.get(expert, zero) for expert in range(NUM_EXPERTS)]) for row in rows])


def greatest(values, count):
    plain = [float(torch.as_tensor(value).detach()) for value in values]
    return sorted(range(len(plain)), key=lambda index: -plain[index])[:count]


# ---------------------------------------------------------------------------------------------------------------- s-base


def sinkhorn_by_hand(logits, rounds=200):
    """Scale rows and columns of the exponentials in turn until both sums are even."""
    plan = [[math.exp(value) for value in row] for row in logits.tolist()]
    for _ in range(rounds):
        plan = [[value / sum(row) / NUM_TOKENS for value in row] for row in plan]
        sums = [sum(row[expert] for row in plan) for expert in range(NUM_EXPERTS)]
        plan = [[value / total / NUM_EXPERTS for value, total in zip(row, sums, strict=True)] for row in plan]
    return plan


def s_base_gates(logits, chosen):
    squash = sigmoid if len(chosen[0]) == 1 else softmax
    return table([{expert: squash(row)[expert] for expert in experts} for row, experts in zip(logits, chosen, strict=True)])


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_sinkhorn_picks_from_the_balanced_plan(topk, seed):
    def reference(logits):
        chosen = [greatest(row, topk) for row in sinkhorn_by_hand(logits)]
        return s_base_gates(logits, chosen), chosen

    same_as(build(SBaseRouter, topk=topk, assignment=Assignment.SINKHORN), reference, some_logits(seed))


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_is_megatrons_own_where_that_stays_finite(topk):
    ours, logits = build(SBaseRouter, topk=topk, assignment=Assignment.SINKHORN), some_logits()
    theirs = build(TopKRouter, topk=topk, config={"moe_router_load_balancing_type": "sinkhorn"})
    for one, other in zip(ours.routing(logits), theirs.routing(logits), strict=True):
        assert torch.equal(one, other)
    # Where the exponential of a logit is infinite, Megatron's plan is not a number.
    probs, routed = ours.routing(logits + 100)
    assert torch.equal(routed, ours.routing(logits)[1])
    assert probs.isfinite().all()


@pytest.mark.parametrize("topk", [1, 2])
def test_the_auction_gives_every_expert_its_share(topk):
    logits = some_logits()
    with torch.no_grad():
        logits[..., 0] += 5.0
    router = build(SBaseRouter, topk=topk, assignment=Assignment.AUCTION)
    chosen = [row.nonzero().flatten().tolist() for row in router.routing(logits)[1]]
    routed = same_as(router, lambda plain: (s_base_gates(plain, chosen), chosen), logits)
    assert routed.sum(dim=0).tolist() == [NUM_TOKENS * topk // NUM_EXPERTS] * NUM_EXPERTS


@pytest.mark.parametrize("assignment", list(Assignment))
@pytest.mark.parametrize("topk", [1, 2])
def test_evaluation_takes_the_best_whatever_the_balance(assignment, topk):
    def reference(logits):
        chosen = [greatest(row, topk) for row in logits]
        return s_base_gates(logits, chosen), chosen

    logits = some_logits()
    with torch.no_grad():
        logits[..., 0] += 20.0
    routed = same_as(build(SBaseRouter, topk=topk, assignment=assignment).eval(), reference, logits)
    assert routed[:, 0].all()


# ------------------------------------------------------------------------------------------------------------- loss-free

BIAS = (0.3, -0.2, 0.0, 0.1)


def loss_free_reference(topk, score, *, before=False, scale=1.0):
    """Selection by score plus bias, gates by score: softmax over the chosen, or before choosing, or normalised sigmoids."""

    def reference(logits):
        chosen, rows = [], []
        for row in logits:
            scores = {"softmax": softmax, "sigmoid": sigmoid}[score](row)
            experts = greatest([value + bias for value, bias in zip(scores, BIAS, strict=True)], topk)
            if score == "softmax" and not before:
                gates = dict(zip(experts, softmax([row[expert] for expert in experts]), strict=True))
            else:
                total = sum(scores[expert] for expert in experts) if score == "sigmoid" and topk > 1 else 1.0
                gates = {expert: scores[expert] / total for expert in experts}
            chosen.append(experts)
            rows.append({expert: gate * scale for expert, gate in gates.items()})
        return table(rows), chosen

    return reference


@pytest.mark.parametrize(
    ("topk", "score", "before", "scale"),
    [
        (2, "softmax", False, None),
        (2, "softmax", True, 2.5),
        (1, "softmax", True, None),
        (2, "sigmoid", False, 2.5),
        (1, "sigmoid", False, None),
    ],
)
def test_the_bias_selects_and_does_not_weigh(topk, score, before, scale):
    config = {
        "moe_router_score_function": score,
        "moe_router_pre_softmax": before,
        "moe_router_topk_scaling_factor": scale,
    }
    router = build(LossFreeRouter, topk=topk, config=config, rate=0.1)
    plain = router.routing(some_logits())[1]
    router.expert_bias += torch.tensor(BIAS)
    routed = same_as(router, loss_free_reference(topk, score, before=before, scale=scale or 1.0), some_logits())
    assert not torch.equal(routed, plain)


@pytest.mark.parametrize("groups", [{}, {"moe_router_num_groups": 2, "moe_router_group_topk": 1}])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_it_is_megatrons_router_as_long_as_the_bias_is_zero_and_with_sigmoid_after(score, groups):
    config = {"moe_router_score_function": score, "moe_router_pre_softmax": True, **groups}
    router, logits = build(LossFreeRouter, config=config, rate=0.1), some_logits()
    for bias in [0.0, *([BIAS] if score != "softmax" else [])]:
        router.expert_bias.copy_(torch.tensor(bias))
        theirs = topk_routing_with_score_function(
            logits.view(NUM_TOKENS, NUM_EXPERTS),
            2,
            use_pre_softmax=True,
            num_groups=groups.get("moe_router_num_groups"),
            group_topk=groups.get("moe_router_group_topk"),
            score_function=score,
            expert_bias=None if score == "softmax" else router.expert_bias,
        )
        for one, other in zip(router.routing(logits), theirs, strict=True):
            assert torch.equal(one, other)


def test_the_bias_follows_the_sign_of_the_integer_difference_to_the_mean():
    router = build(LossFreeRouter, rate=0.25).bfloat16()
    assert router.expert_bias.dtype == torch.bfloat16
    router.update_bias(torch.tensor([1, 2, 3, 2]))
    router.update_bias(torch.tensor([0, 0, 0, 1]))
    assert router.expert_bias.dtype == torch.float32
    assert router.expert_bias.tolist() == [0.5, 0.25, 0.0, -0.25]


def test_it_counts_what_it_selects_while_training_before_anything_is_dropped():
    logits = some_logits()
    with torch.no_grad():
        logits[..., 0] += 20.0
    router = build(LossFreeRouter, rate=0.1, config={"moe_expert_capacity_factor": 0.5})
    padding = torch.zeros(SEQUENCE, BATCH, dtype=torch.bool)
    padding[-1] = True
    routed = router.routing(logits, padding)[1]
    assert router.step_tokens[0] == NUM_TOKENS - BATCH
    assert int(router.step_tokens.sum()) == (NUM_TOKENS - BATCH) * 2
    # ceil(0.5 x 12 tokens x 2 / 4 experts)
    assert int(routed.sum(dim=0).max()) == 3
    router.eval().routing(logits)
    assert int(router.step_tokens.sum()) == (NUM_TOKENS - BATCH) * 2


@pytest.mark.parametrize("reentrant", [True, False])
def test_it_counts_a_recomputed_batch_once(reentrant):
    router = build(LossFreeRouter, rate=0.1)
    probs, _ = checkpoint(router.routing, some_logits(), use_reentrant=reentrant)
    probs.sum().backward()
    assert int(router.step_tokens.sum()) == NUM_TOKENS * 2


def test_a_checkpoint_without_the_bias_loads_while_that_is_said():
    router, plain = build(LossFreeRouter, rate=0.1), build(TopKRouter)
    assert set(router.state_dict()) == {"weight", "expert_bias"}
    with pytest.raises(RuntimeError, match="expert_bias"):
        router.load_state_dict(plain.state_dict())
    router.saved = False
    router.load_state_dict(plain.state_dict())
    assert torch.equal(router.weight, plain.weight)
    assert router.expert_bias.tolist() == [0.0] * NUM_EXPERTS


# --------------------------------------------------------------------------------------------------------- expert choice


@pytest.mark.parametrize(("factor", "capacity"), [(1.0, 6), (0.5, 3), (0.7, 5), (9.0, 12)])
def test_experts_take_their_best_tokens(factor, capacity):
    def reference(logits):
        scores = [softmax(row) for row in logits]
        taken = [greatest([row[expert] for row in scores], capacity) for expert in range(NUM_EXPERTS)]
        chosen = [[expert for expert in range(NUM_EXPERTS) if token in taken[expert]] for token in range(NUM_TOKENS)]
        rows = [{expert: row[expert] for expert in experts} for row, experts in zip(scores, chosen, strict=True)]
        return table(rows), chosen

    routed = same_as(build(ExpertChoiceRouter, capacity_factor=factor), reference, some_logits())
    assert routed.sum(dim=0).tolist() == [capacity] * NUM_EXPERTS


def test_padding_is_refused_where_it_would_be_taken_for_tokens():
    padding = torch.zeros(SEQUENCE, BATCH, dtype=torch.bool)
    for router in (build(SBaseRouter, assignment=Assignment.SINKHORN), build(ExpertChoiceRouter, capacity_factor=1.0)):
        with pytest.raises(JobError, match="without padding"):
            router.routing(some_logits(), padding)
