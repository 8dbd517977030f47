"""Specs with our routers: they travel, build MoE layers with Megatron's dispatchers, and leave dense layers alone."""

import pickle
from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dyn.dynamics.moe.routers import ExpertChoiceRouter, LossFreeRouter, SBaseRouter
from megatron_dyn.dynamics.moe.settings import MoeSettings, Routing
from megatron_dyn.dynamics.moe.specs import has_experts, let_counts_vary, router_of, with_router
from tests.unit.dynamics.moe.layers import HIDDEN, NUM_EXPERTS, build_layer, experts_of

CLASSES = {Routing.S_BASE: SBaseRouter, Routing.LOSS_FREE: LossFreeRouter, Routing.EXPERT_CHOICE: ExpertChoiceRouter}


@pytest.fixture
def one_stage(one_rank, cpu_platform):
    """Megatron's groups, of one rank each."""
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("routing", CLASSES)
def test_a_spec_with_our_router_travels_and_a_dense_one_stays(routing):
    router = router_of(MoeSettings(routing=routing))
    moe, dense = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False), get_gpt_layer_local_spec()
    before = experts_of(moe).router
    arrived = pickle.loads(pickle.dumps(with_router(moe, router)))
    assert experts_of(arrived).router.func is CLASSES[routing]
    assert experts_of(moe).router is before
    assert with_router(dense, router) is dense


def test_specs_of_0_17_are_understood():
    layer = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    inner = MoESubmodules(experts=object())
    layer.submodules.mlp = ModuleSpec(module=MoELayer, submodules=inner)
    router = router_of(MoeSettings(routing=Routing.LOSS_FREE))
    changed = with_router(layer, router).submodules.mlp
    assert changed.submodules.router is router
    assert changed.submodules.experts is inner.experts


def test_megatrons_routing_needs_no_router_of_ours():
    assert router_of(MoeSettings(record=True)) is None
    assert not has_experts(SimpleNamespace(mlp=torch.nn.Identity()))


def mixed_by_hand(layer, hidden):
    """The output of a MoE layer, expert by expert and token by token: the gate times what the expert makes of the token."""
    probs, routed = layer.router(hidden)
    tokens = hidden.view(-1, HIDDEN)
    output = []
    for token, gates, chosen in zip(tokens, probs, routed, strict=True):
        total = torch.zeros_like(token)
        for expert in chosen.nonzero().flatten().tolist():
            weights = layer.experts.local_experts[expert]
            inner = torch.nn.functional.gelu(weights.linear_fc1.weight @ token)
            total = total + gates[expert] * (weights.linear_fc2.weight @ inner)
        output.append(total)
    return torch.stack(output).view_as(hidden)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    "settings",
    [
        MoeSettings(routing=Routing.S_BASE),
        MoeSettings(routing=Routing.LOSS_FREE),
        MoeSettings(routing=Routing.EXPERT_CHOICE),
        MoeSettings(routing=Routing.EXPERT_CHOICE, capacity_factor=0.3),
        MoeSettings(routing=Routing.EXPERT_CHOICE, capacity_factor=1.7),
    ],
    ids=lambda settings: f"{settings.routing.value}-{settings.capacity_factor}",
)
def test_a_layer_mixes_its_experts_as_the_router_says(one_stage, dispatcher, settings):
    layer = build_layer(settings, dispatcher).mlp
    if settings.routing is Routing.EXPERT_CHOICE:
        let_counts_vary(layer)
    hidden = torch.randn(5, 2, HIDDEN, generator=torch.Generator().manual_seed(1))
    results = []
    for run in (lambda x: layer(x)[0], lambda x: mixed_by_hand(layer, x)):
        leaf = hidden.clone().requires_grad_()
        layer.zero_grad()
        output = run(leaf)
        output.square().sum().backward()
        results.append((output, leaf.grad, [parameter.grad.clone() for parameter in layer.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-6)


def test_counts_vary_for_one_dispatcher_alone(one_stage):
    layer = build_layer(MoeSettings(routing=Routing.EXPERT_CHOICE), "alltoall").mlp
    let_counts_vary(layer)
    assert layer.config.moe_expert_capacity_factor is None
    assert layer.token_dispatcher.config is not layer.config
    assert not layer.token_dispatcher.drop_and_pad
