"""Experts on real ranks: routers and biases under moves, recomputation, expert parallelism and resume; loads that add up."""

import pytest

from megatron_dyn.dynamics.moe.loads import causes_of_round
from tests.distributed.matrix import TINY
from tests.distributed.plugin_run import run, run_to_exit, train

NUM_EXPERTS, TOPK, NUM_STEPS = 4, 2, 6
PAIRS_A_STEP = 2 * TINY["seq_length"] * TOPK
"""Of a layer: two samples a step in all runs here."""
FLAGS = {
    **TINY,
    "num_experts": NUM_EXPERTS,
    "disable_bias_linear": True,
    "moe_token_dispatcher_type": "alltoall",
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|ttL",
    "global_batch_size": 2,
    "train_iters": NUM_STEPS,
    "dyn_moe": True,
    "dyn_moe_interval": 3,
}
LOSS_FREE = {**FLAGS, "dyn_moe_routing": "loss-free", "dyn_moe_bias_rate": 0.05}
EP2 = {"expert_model_parallel_size": 2}
SHARDED = {"bf16": True, "use_distributed_optimizer": True}
MOVES = "1:Ettt|tL;4:Et|tttL"
STOP = {"save_interval": 4, "exit_interval": 4}


def biases(state):
    return {name: digest for name, digest in state.items() if "expert_bias" in name}


def same_everywhere(moved, still):
    """Losses, parameters, biases, and what was told of the loads."""
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state
    assert moved.changes == still.changes
    assert [line["outcome"] for line in moved.rounds] == ["commit", "commit"]


def stop_after_four_steps(folder, **flags):
    results = run_to_exit(2, train, save=str(folder), **STOP, **flags)
    assert [result.exitcode for result in results] == [0, 0], results[0].output[-2000:]


@pytest.fixture(scope="module")
def loss_free():
    return run(2, **LOSS_FREE)


def test_biases_move_with_their_layers(loss_free):
    same_everywhere(run(2, **LOSS_FREE, dyn_layout_at=MOVES), loss_free)
    # They did steer: every layer has another one.
    assert len({str(digest) for digest in biases(loss_free.state).values()}) == 4


def test_a_resumed_run_continues_in_every_bit(tmp_path, loss_free):
    stop_after_four_steps(tmp_path, **LOSS_FREE, dyn_layout_at="1:Ettt|tL", dyn_exact_grad_norm=True)
    resumed = run(2, **LOSS_FREE, load=str(tmp_path), dyn_layout_at="5:Et|tttL")
    assert resumed.numbers() == loss_free.numbers()[4:]
    assert resumed.state == loss_free.state
    # The interval that was cut short begins anew.
    assert [(line["iteration"], line["steps"]) for line in resumed.changes] == [(6, 2)]


def test_a_run_without_a_bias_may_be_continued_with_one(tmp_path):
    stop_after_four_steps(tmp_path, **FLAGS)
    resumed = run(2, **LOSS_FREE, load=str(tmp_path))
    assert [line["iteration"] for line in resumed.losses] == [5, 6]
    assert len(biases(resumed.state)) == 4


def test_recomputed_layers_count_once_and_steer_alike(loss_free):
    again = run(2, **LOSS_FREE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert again.changes == loss_free.changes
    assert biases(again.state) == biases(loss_free.state)
    for line in again.changes:
        assert line["steps"] == 3
        assert [sum(entry["tokens_per_expert"]) for entry in line["layers"]] == [3 * PAIRS_A_STEP] * 4


def test_expert_ranks_are_told_apart_and_biases_see_the_whole_batch():
    flags = {**LOSS_FREE, **EP2, **SHARDED}
    still = run(4, **flags)
    same_everywhere(run(4, **flags, dyn_layout_at=MOVES), still)
    assert [line["iteration"] for line in still.changes] == [3, 6]
    for entry in (entry for line in still.changes for entry in line["layers"]):
        tokens = entry["tokens_per_expert"]
        assert sum(tokens) == 3 * PAIRS_A_STEP
        # Counted at the router on one side, at the experts on the other.
        assert entry["expert_rank_tokens"] == [sum(tokens[:2]), sum(tokens[2:])]
        assert 3 * PAIRS_A_STEP / 2 <= entry["slowest_rank_tokens"] <= 3 * PAIRS_A_STEP
        assert entry["expert_imbalance"] == entry["slowest_rank_tokens"] * 2 / sum(tokens)
    assert any(entry["expert_imbalance"] > 1 for line in still.changes for entry in line["layers"])


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        (4, {"dyn_moe_routing": "expert-choice", "dyn_moe_capacity_factor": 0.7, **EP2, **SHARDED}),
        (2, {"dyn_moe_routing": "s-base", "dyn_moe_assignment": "auction"}),
    ],
    ids=["expert-choice", "s-base"],
)
def test_routers_that_balance_do_so_under_moves(world_size, flags):
    still = run(world_size, **FLAGS, **flags)
    same_everywhere(run(world_size, **FLAGS, **flags, dyn_layout_at=MOVES), still)
    for entry in (entry for line in still.changes for entry in line["layers"]):
        assert entry["max_over_mean"] == entry["entropy"] == entry["expert_imbalance"] == 1.0


@pytest.fixture(scope="module")
def aux_loss():
    """Dense and expert layers mixed, Megatron's own balancing, a capacity that drops: flags, and the run without moves."""
    flags = {
        **FLAGS,
        "moe_layer_freq": "[0,1,0,1]",
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": 1e-2,
        "moe_expert_capacity_factor": 1.0,
        "dyn_moe_interval": 1,
    }
    return flags, run(2, **flags)


def test_megatrons_balancing_and_capacity_work_on_under_moves(aux_loss):
    flags, still = aux_loss
    same_everywhere(run(2, **flags, dyn_layout_at=MOVES), still)
    for entry in (entry for line in still.changes for entry in line["layers"]):
        assert entry["layer"] in (1, 3)
        assert sum(entry["tokens_per_expert"]) + entry["dropped"] == PAIRS_A_STEP
        # A micro-batch has as many places for an expert as its even share.
        assert max(entry["tokens_per_expert"]) <= PAIRS_A_STEP // NUM_EXPERTS
    assert any(entry["dropped"] for line in still.changes for entry in line["layers"])


def test_loads_are_reported_with_the_times_of_a_round(aux_loss):
    flags, still = aux_loss
    measure = {"dyn_rebalance": "at:4", "dyn_profile_warmup": 0, "dyn_profile_interval": 1, "dyn_profile_window": 2}
    measured = run(2, **flags, **measure)
    assert measured.numbers() == still.numbers()
    assert measured.changes == still.changes
    (line,) = measured.rounds
    told = {entry["layer"]: entry["dynamics"]["moe"] for entry in line["layers"] if "dynamics" in entry}
    assert told == {entry["layer"]: {"iteration": 4, "steps": 1} | without_id(entry) for entry in still.changes[3]["layers"]}
    causes = causes_of_round(line)
    assert causes.expert_imbalance == 1.0
    assert causes.stage_imbalance >= 1.0


def without_id(entry):
    return {name: fact for name, fact in entry.items() if name != "layer"}


def test_bad_input_ends_the_job_before_it_trains():
    results = run_to_exit(2, train, **{**FLAGS, "num_experts": None, "moe_token_dispatcher_type": None})
    assert [result.exitcode for result in results] == [2, 2]
    assert "megatron_dyn: error: --dyn-moe: expected a model with experts (--num-experts)" in results[0].output
    assert "building GPT model" not in results[0].output
