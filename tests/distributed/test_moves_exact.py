"""What the matrix does not show: data order, requests within a step, Megatron's own norm, and nothing left behind."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from megatron_dyn.host.seams import apply
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.matrix import TINY
from tests.distributed.plugin_run import REPORT_FLAGS, read_lines, row, run, train_and_dump

FLAGS = {
    **TINY,
    "num_layers": 5,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|tttL",
    "global_batch_size": 4,
    "train_iters": 8,
}


def test_the_data_order_and_the_validation_loss_are_untouched():
    flags = {**FLAGS, "train_iters": 6, "eval_interval": 2, "eval_iters": 2}
    still = run(2, **flags)
    moved = run(2, dyn_layout_at="1:Et*4|tL;3:Et|t*4L", **flags)
    assert moved.numbers() == still.numbers()
    assert moved.consumed_samples == still.consumed_samples


def test_a_request_within_a_step_waits_for_its_end_and_the_last_one_counts(tmp_path):
    still = run(2, **FLAGS)
    argv = tiny_gpt_arguments(**{**REPORT_FLAGS, **FLAGS, "dyn_report_dir": str(tmp_path), "dyn_rebalance": "at:1000"})
    run_ranks(request_within_a_step, 2, argv, timeout_seconds=120)
    losses, rounds = read_lines(tmp_path / "losses.jsonl"), read_lines(tmp_path / "rounds.jsonl")
    assert [(line["iteration"], line["outcome"], line["layout_after"]) for line in rounds] == [(3, "commit", "Et*4|tL")]
    assert rounds[0]["reason"] == "requested"
    assert [line["layout"] for line in losses] == ["Et*2|t*3L"] * 3 + ["Et*4|tL"] * 5
    assert [(line["iteration"], line["losses"], line["grad_norm"]) for line in losses] == still.numbers()


def request_within_a_step(argv: Sequence[str]) -> None:
    """Ask for two layouts in the middle of step 3, between its micro-batches."""
    installer = importlib.import_module("megatron_dyn.installer")
    requests: list[Any] = []
    counted = [0]

    def installing(original: Callable[..., Any]) -> Callable[..., Any]:
        def install(*args: Any, **kwargs: Any) -> Any:
            installation = original(*args, **kwargs)
            requests.append(installation.request)
            return installation

        return install

    def asking(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            counted[0] += 1
            # Four micro-batches a step: the tenth forward is the second of step 3.
            if counted[0] == 10:
                requests[0]("Et|ttttL")
                requests[0]("Etttt|tL")
            return original(*args, **kwargs)

        return forward_step

    installer.install = installing(installer.install)
    with apply([row("megatron.core.pipeline_parallel.schedules:forward_step", asking)]):
        train_and_dump(argv)


def test_without_the_exact_norm_only_the_last_bits_differ():
    """What docs/assumptions.md states for Megatron's own norm: a move changes the order of one fp32 sum, no more."""
    flags = {**FLAGS, "train_iters": 20, "dyn_exact_grad_norm": False}
    still = run(2, **flags)
    moved = run(2, extra=["--no-dyn-exact-grad-norm"], dyn_layout_at="3:Et*4|tL;9:Et|t*4L", **flags)
    for one, other in zip(still.losses, moved.losses, strict=True):
        loss, expected = (float.fromhex(line["losses"]["lm loss"]) for line in (other, one))
        norm, expected_norm = (float.fromhex(line["grad_norm"]) for line in (other, one))
        # A few units in the last place of fp32 (2**-24), grown over at most 17 Adam steps.
        assert abs(loss - expected) <= 1e-5 * abs(expected)
        assert abs(norm - expected_norm) <= 1e-4 * expected_norm


def test_a_hundred_moves_leave_nothing_behind():
    """Case C12, and more: after every return to a layout there is as much of everything as at the first."""
    num_moves = 100
    layouts = ";".join(f"{step}:{'Et|t*2L' if step % 2 else 'Et*2|tL'}" for step in range(1, num_moves + 1))
    overlap = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True, "bf16": True}
    flags = {**FLAGS, **overlap, "num_layers": 3, "pipeline_model_parallel_layout": "Ett|tL"}
    flags |= {"train_iters": num_moves + 2, "global_batch_size": 1}
    moved = run(2, watch=10, dyn_layout_at=layouts, **flags)
    assert [line["outcome"] for line in moved.rounds] == ["commit"] * num_moves
    for looks in moved.footings:
        # All at the same layout, since moves alternate; the first comes after what is made once and kept for good.
        assert len(looks) == num_moves // 10
        assert {each.counts for each in looks} == {looks[0].counts}
        # Megatron's own log of losses and the allocator may take some pages; a lost stage a move would be 20 MB by now.
        assert looks[-1].resident_bytes - looks[4].resident_bytes < 8 * 2**20
