"""Measuring and rebalancing on real ranks. Compute is emulated by layers that sleep, so that two cores show four stages."""

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_dyn.records import Layout
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.plugin_run import REPORT_FLAGS, read_lines, run, train

FORWARD_SECONDS, BACKWARD_SECONDS = 0.004, 0.008
HEAVY = 4.0
FLAGS = {"pipeline_model_parallel_size": 2, "global_batch_size": 4, "micro_batch_size": 1}
# Decisions look at the steps left in the run; the run itself stops early.
LONG_RUN = {"train_iters": 1000}


def train_asleep(argv: Sequence[str], heavy_layers: Sequence[int]) -> None:
    """Train with layers that sleep on the way forward and backward, `heavy_layers` longer, wherever they are."""
    torch = importlib.import_module("torch")
    layer_class = importlib.import_module("megatron.core.transformer.transformer_layer").TransformerLayer

    class Sleep(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, hidden: Any, factor: float) -> Any:
            ctx.factor = factor
            time.sleep(FORWARD_SECONDS * factor)
            return hidden.view_as(hidden)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            time.sleep(BACKWARD_SECONDS * ctx.factor)
            return grad, None

    def sleeping(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            hidden, context = original(self, *args, **kwargs)
            factor = HEAVY if self.layer_number - 1 in heavy_layers else 1.0
            # The clone keeps the output free of views, which Megatron's schedule insists on.
            return Sleep.apply(hidden, factor).clone(), context

        return forward

    layer_class.forward = sleeping(layer_class.forward)
    train(argv)


def rounds_of(folder: Any, world_size: int, heavy_layers: Sequence[int], **flags: Any) -> list[dict[str, Any]]:
    argv = tiny_gpt_arguments(**{"dyn_report_dir": str(folder), **REPORT_FLAGS, **FLAGS, **flags})
    run_ranks(train_asleep, world_size, argv, list(heavy_layers), timeout_seconds=150)
    return read_lines(folder / "rounds.jsonl")


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recompute"])
def test_every_layer_gets_its_own_time(tmp_path, recompute):
    more = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2} if recompute else {}
    rounds = rounds_of(tmp_path, 2, [5], train_iters=6, dyn_rebalance="at:6", dyn_min_gain=0.99, **more)
    (line,) = rounds
    layers = line["layers"]
    assert [layer["layer"] for layer in layers] == list(range(8))
    for layer in layers:
        factor = HEAVY if layer["layer"] == 5 else 1.0
        # Megatron's block method recomputes the first two layers of a stage: their forward sleeps again in the backward.
        again = recompute and layer["layer"] in (0, 1, 4, 5)
        forward, backward = FORWARD_SECONDS * factor, (BACKWARD_SECONDS + FORWARD_SECONDS * again) * factor
        # Never less than what was slept; the rest is the tiny layer itself on a busy machine.
        assert forward <= layer["forward_seconds"] < forward + 0.02
        assert backward <= layer["backward_seconds"] < backward + 0.03
        assert layer["state_bytes"] > layer["activation_bytes"]
        # A recomputed layer keeps no activations of its own.
        assert (layer["activation_bytes"] > 0) != again
    busy = [stage["forward_seconds"] + stage["backward_seconds"] for stage in line["stages"]]
    assert busy[1] > busy[0]
    assert line["embedding"]["state_bytes"] > 0
    assert line["head"]["forward_seconds"] > 0


def test_a_stationary_skew_gives_exactly_one_move_to_the_best_split(tmp_path):
    # Costs 1 1 1 1 1 1 4 4: uniform makes 4 and 10, the best split 6 and 8 (6 and 2 layers).
    rounds = rounds_of(
        tmp_path,
        2,
        [6, 7],
        **LONG_RUN,
        exit_interval=26,
        dyn_rebalance="auto",
        dyn_profile_interval=2,
        dyn_profile_window=3,
        dyn_cooldown_steps=2,
        dyn_min_gain=0.1,
    )
    commits = [line for line in rounds if line["outcome"] == "commit"]
    assert [line["layout_after"] for line in commits] == ["Et*6|t*2L"]
    (move,) = commits
    assert move["measured_after_seconds"] < move["measured_before_seconds"]
    assert move["predicted_after_seconds"] < move["predicted_before_seconds"]
    assert all(line["reason"] for line in rounds)


def test_four_stages_find_the_best_split_too(tmp_path):
    # Costs 4 1 1 1 1 1 1 4 on four stages: 1 3 3 1 layers make 4 3 3 4; uniform made 5 2 2 5. With as few micro-batches as
    # stages a heavier first stage would be as good: filling and draining then count as much as the slowest stage.
    rounds = rounds_of(
        tmp_path,
        4,
        [0, 7],
        **LONG_RUN,
        exit_interval=9,
        global_batch_size=8,
        pipeline_model_parallel_size=4,
        dyn_rebalance="at:8",
        dyn_min_gain=0.02,
    )
    assert rounds[0]["outcome"] == "commit"
    assert rounds[0]["layout_after"] == "Et|t*3|t*3|tL"


def test_virtual_stages_are_rebalanced_by_the_sum_over_their_chunks(tmp_path):
    # Costs 4 4 1 1 1 1 1 1 on chunks of two: rank 0 has 4+4+1+1, rank 1 four ones. The best split makes 7 and 7.
    (line,) = rounds_of(
        tmp_path,
        2,
        [0, 1],
        **LONG_RUN,
        exit_interval=9,
        num_virtual_stages_per_pipeline_rank=2,
        dyn_rebalance="at:8",
        dyn_min_gain=0.02,
    )
    assert line["outcome"] == "commit", line["reason"]
    layout = Layout.parse(line["layout_after"], 2)
    work = [sum(HEAVY if layer in (0, 1) else 1.0 for layer in layout.layers_of_stage(rank)) for rank in range(2)]
    # 7 and 7, or next to it when something else ran on the cores while a layer was timed.
    assert max(work) <= 8.0
    assert line["predicted_after_seconds"] < line["predicted_before_seconds"]


def test_replicas_share_one_snapshot_and_move_together():
    moved = run(4, **FLAGS | {"global_batch_size": 8}, train_iters=8, dyn_rebalance="every:4", dyn_min_gain=0.0)
    assert len(moved.rounds) == 2
    assert all(line["outcome"] in ("commit", "no_change") for line in moved.rounds)
    still = run(4, **FLAGS | {"global_batch_size": 8}, train_iters=8)
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state


def test_an_early_round_says_that_nothing_was_measured():
    early = run(2, **FLAGS, train_iters=3, dyn_rebalance="at:1")
    assert early.rounds[0]["outcome"] == "no_change"
    assert "nothing measured yet" in early.rounds[0]["reason"]
