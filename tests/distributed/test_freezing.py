"""Layer freezing on real ranks: what is frozen stays in every bit, nothing else changes, and moves and resumes are exact."""

import tempfile
from pathlib import Path

import pytest

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.frozen_run import train_with_frozen_layers
from tests.distributed.plugin_run import REPORT_FLAGS, merge, read_lines, run

TINY = {
    "num_layers": 6,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 10,
    "pipeline_model_parallel_size": 2,
}
SHARDED = {
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "global_batch_size": 8,
}
UNTIED = {"untie_embeddings_and_output_weights": True}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1, **UNTIED}
VIRTUAL = {"pipeline_model_parallel_layout": "Et*2|t*2|t|tL", "use_distributed_optimizer": True, **UNTIED}
MTP = {"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Et*3|t*3mL", "position_embedding_type": "rope"}
SCHEDULE = '{"0-3": [2, 6], "5": [3, 8]}'
FREEZES = {"dyn_freeze": SCHEDULE}
EGERIA = "egeria:interval=1,window=2,tolerance=0.9,patience=1,update=2"
MOVES = "1:Et|t*5L;3:Et*5|tL;5:Et*2|t*4L;7:Et*4|t*2L"


def frozen_after(found):
    """What was frozen after each change: (finished iterations, layers)."""
    return [(change["iteration"], change["frozen_layers"]) for change in found.changes]


@pytest.mark.parametrize(
    ("world_size", "flags", "moves"),
    [
        pytest.param(2, FREEZES, MOVES, id="plain-drop"),
        pytest.param(4, {**FREEZES, **SHARDED, "dyn_freeze_state": "park"}, MOVES, id="sharded-park"),
        pytest.param(2, {**FREEZES, **RECOMPUTED}, MOVES, id="full-recompute-untied"),
        pytest.param(2, {**FREEZES, **VIRTUAL}, "3:Et|t|t*2|t*2L;5:Et*2|t*2|t|tL", id="virtual-sharded"),
        pytest.param(4, {**FREEZES, **UNTIED, **SHARDED, **MTP}, "3:Et|t*5mL;5:Et*3|t*3mL", id="mtp-sharded"),
        pytest.param(2, {"dyn_freeze": "autofreeze:percentile=80,evaluations=10"}, MOVES, id="autofreeze"),
        pytest.param(2, {"dyn_freeze": EGERIA, "bf16": True}, MOVES, id="egeria"),
    ],
)
def test_moves_in_the_middle_change_nothing(world_size, flags, moves):
    still = run(world_size, **{**TINY, "dyn_exact_grad_norm": True, **flags})
    moved = run(world_size, **{**TINY, **flags}, dyn_layout_at=moves)
    assert {line["outcome"] for line in moved.rounds} == {"commit"}
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state
    assert frozen_after(moved) == frozen_after(still)
    if flags["dyn_freeze"] == SCHEDULE:
        assert frozen_after(still) == [(2, [0, 1, 2, 3]), (3, [0, 1, 2, 3, 5]), (6, [5]), (8, [])]
    else:
        # Both methods freeze from the front, and something, or there was nothing to compare.
        assert still.changes
        assert all(layers == list(range(len(layers))) for _, layers in frozen_after(still))


@pytest.mark.parametrize("flags", [UNTIED, {**UNTIED, **SHARDED, "global_batch_size": 4}], ids=["plain", "sharded"])
def test_frozen_from_the_start_is_what_a_model_built_frozen_gives(flags):
    """The reference computes input gradients where we compute none, and freezes before Megatron wraps the model."""
    ours = run(2, **{**TINY, **flags}, dyn_freeze='{"0-3": -1}', dyn_exact_grad_norm=True)
    with tempfile.TemporaryDirectory() as folder:
        words = {**TINY, **flags, **REPORT_FLAGS, "dyn_report_dir": folder}
        dumps = run_ranks(train_with_frozen_layers, 2, tiny_gpt_arguments(**words), (0, 1, 2, 3))
        losses = read_lines(Path(folder) / "losses.jsonl")
    assert ours.numbers() == [(line["iteration"], line["losses"], line["grad_norm"]) for line in losses]
    state = merge([dump["state"] for dump in dumps])
    assert ours.state == state
    assert not any(described["requires_grad"] for name, described in state.items() if name.startswith("layer 3 "))


def test_a_frozen_prefix_computes_no_backward_and_a_frozen_layer_behind_no_weight_gradients():
    found = run(2, **TINY, dyn_freeze='{"0-2": -1, "4": -1}', dyn_rebalance="at:10", dyn_min_gain=0.99)
    (line,) = found.rounds
    backward = [layer["backward_seconds"] for layer in line["layers"]]
    assert backward[:3] == [0.0] * 3
    assert min(backward[3:]) > 0
    assert [layer["dynamics"]["freeze"]["backward"] for layer in line["layers"]] == [
        *["none"] * 3,
        "full",
        "input only",
        "full",
    ]
    frozen_bytes = {line["layers"][layer]["state_bytes"] for layer in (0, 1, 2, 4)}
    trained_bytes = {line["layers"][layer]["state_bytes"] for layer in (3, 5)}
    # fp32: a parameter alone, against parameter, gradient and two moments.
    assert [4 * size for size in frozen_bytes] == list(trained_bytes)


@pytest.mark.parametrize(
    ("world_size", "flags"),
    [
        pytest.param(2, {"dyn_freeze_state": "park"}, id="plain-park"),
        pytest.param(4, {**SHARDED, "dist_ckpt_optim_fully_reshardable": True, "dyn_freeze_state": "park"}, id="sharded-park"),
        pytest.param(2, {"dyn_freeze": EGERIA, "ckpt_format": "torch"}, id="egeria-torch"),
        # Nothing trains on the first rank, which writes what all ranks share.
        pytest.param(2, {**UNTIED, "bf16": True}, id="frozen-stage-bf16"),
        pytest.param(4, {**UNTIED, **SHARDED, "dist_ckpt_optim_fully_reshardable": True}, id="frozen-stage-sharded"),
    ],
)
def test_a_run_continues_in_the_middle_as_if_it_had_not_ended(tmp_path, world_size, flags):
    flags = {**TINY, **FREEZES, "dyn_exact_grad_norm": True, "ckpt_format": "torch_dist", **flags}
    through = run(world_size, **flags, save=str(tmp_path), save_interval=5)
    rest = run(world_size, **flags, load=str(tmp_path), ckpt_step=5, dyn_layout_at="6:Et*2|t*4L")
    assert rest.numbers() == through.numbers()[5:]
    assert rest.state == through.state
    assert frozen_after(rest) == [change for change in frozen_after(through) if change[0] > 5]
