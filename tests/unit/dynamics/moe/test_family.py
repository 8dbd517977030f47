"""The family on one rank: what it attaches, when it tells, how biases move, and what a checkpoint has to know."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)

from megatron_dyn.dynamics.moe.family import MixtureOfExperts
from megatron_dyn.dynamics.moe.routers import LossFreeRouter
from megatron_dyn.dynamics.moe.settings import MoeSettings, Routing
from megatron_dyn.ports import JobError
from megatron_dyn.testing.dynamics import FakeJob
from tests.unit.dynamics.moe.layers import HIDDEN, NUM_EXPERTS, TOPK, build_layer

ARGS = SimpleNamespace(num_layers=3, num_experts=NUM_EXPERTS, expert_model_parallel_size=1, train_iters=5)
LOSS_FREE = MoeSettings(record=True, routing=Routing.LOSS_FREE, interval_steps=2, bias_rate=0.5)


@pytest.fixture
def one_stage(one_rank, cpu_platform):
    """Megatron's groups, of one rank each, and two micro-batches a step."""
    parallel_state.initialize_model_parallel()
    init_num_microbatches_calculator(0, None, 2, 1, 1)
    yield
    unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()


def dense():
    return SimpleNamespace(mlp=torch.nn.Identity())


def started(settings):
    """The family at work on a dense layer and two with experts."""
    family = MixtureOfExperts(settings)
    layers = {0: dense(), 1: build_layer(settings), 2: build_layer(settings)}
    for layer, module in layers.items():
        family.attach(layer, module)
    family.begin(FakeJob(layers, args=ARGS), 0, None)
    family.start(0)
    return family, layers


def train_step(family, layers, step):
    family.before_step(step)
    for _ in range(2):
        for module in (layers[1], layers[2]):
            module.mlp(torch.randn(3, 1, HIDDEN))
    return family.at_boundary(step)


def test_it_tells_at_every_interval_and_at_the_end(one_stage):
    family, layers = started(LOSS_FREE)
    told = [change for step in range(1, 6) for change in train_step(family, layers, step)]
    assert [(change.iteration, change.details["steps"]) for change in told] == [(2, 2), (4, 2), (5, 1)]
    assert not any(change.changes_costs for change in told)
    for change in told:
        assert [entry["layer"] for entry in change.details["layers"]] == [1, 2]
        for entry in change.details["layers"]:
            assert sum(entry["tokens_per_expert"]) == change.details["steps"] * 2 * 3 * TOPK
            assert entry["expert_rank_tokens"] == [sum(entry["tokens_per_expert"])]
            assert entry["expert_imbalance"] == 1.0
    assert family.notes(0) == {}
    assert family.notes(2) == {"iteration": 5, "steps": 1} | {
        name: fact for name, fact in told[-1].details["layers"][1].items() if name != "layer"
    }


def test_the_bias_moves_at_the_boundary_and_stands_still_where_the_layer_is_frozen(one_stage):
    family, layers = started(LOSS_FREE)
    layers[2].mlp.router.weight.requires_grad_(False)
    train_step(family, layers, 1)
    router, frozen = layers[1].mlp.router, layers[2].mlp.router
    assert isinstance(router, LossFreeRouter)
    assert router.expert_bias.abs().max() == 0.5
    assert frozen.expert_bias.tolist() == [0.0] * NUM_EXPERTS
    assert router.step_tokens.tolist() == frozen.step_tokens.tolist() == [0] * NUM_EXPERTS


def test_a_layer_that_arrives_goes_on_counting_where_it_was(one_stage):
    family, layers = started(LOSS_FREE)
    train_step(family, layers, 1)
    arriving = build_layer(LOSS_FREE)
    family.attach(2, arriving)
    for name, buffer in arriving.named_buffers():
        buffer.data = layers[2].get_buffer(name)
    family._job._layers[2] = layers[2] = arriving
    (change,) = train_step(family, layers, 2)
    assert [sum(entry["expert_rank_tokens"]) for entry in change.details["layers"]] == [2 * 2 * 3 * TOPK] * 2


def test_without_recording_nothing_is_counted_or_told(one_stage):
    settings = MoeSettings(routing=Routing.EXPERT_CHOICE)
    family, layers = started(settings)
    assert train_step(family, layers, 5) == ()
    assert not hasattr(layers[1].mlp, "dyn_loads")
    assert layers[1].mlp.token_dispatcher.config is not layers[1].mlp.config


def test_a_bias_is_expected_in_checkpoints_that_were_written_with_one(one_stage):
    family, layers = started(LOSS_FREE)
    router = layers[1].mlp.router
    for state, expected in ((None, False), ({"routing": "megatron"}, False), (family.state(), True)):
        family.begin(FakeJob(layers, args=ARGS), 0, state)
        assert router.saved is expected
        family.start(0)
        assert router.saved


def test_a_model_without_experts_ends_the_job(one_stage):
    family = MixtureOfExperts(LOSS_FREE)
    family.begin(FakeJob({0: dense()}, args=ARGS), 0, None)
    with pytest.raises(JobError, match="expected decoder layers with experts, found none"):
        family.start(0)
