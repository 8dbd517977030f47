"""Something goes wrong in a move, for real and at every phase: the move is completed or the model untouched, no third thing."""

import functools
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from megatron_dyn.records import Layout
from tests.distributed.faulty_run import FaultyRun, Record, run_with_faults
from tests.distributed.matrix import OVERLAP, TINY
from tests.distributed.sabotage import Deed, Fault, Place
from tests.distributed.state_dump import merge

OLD, NEW = "Et*2|t*2L", "Et|t*3L"
SOURCE, DESTINATION = 0, 1
FLAGS = {
    **TINY,
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": OLD,
    "global_batch_size": 2,
    "train_iters": 13,
    "bf16": True,
    "spec": ["tests.distributed.layer_spec", "remembering_layer"],
    # Several buckets for a layer: faults strike when a part of it has arrived.
    "dyn_migrate_bucket_bytes": 5000,
    "dyn_timeout_seconds": 20,
}
NO_ROOM = "MemoryError: no room"
GONE = "a rank did not answer within 20 s or is gone: .*Connection"
CUT_OFF = r"(starting the transfer|(sending to|receiving from) rank \d) failed within 20 s: .*Connection"


@functools.cache
def undisturbed() -> FaultyRun:
    """The run without faults and without moves."""
    with TemporaryDirectory() as folder:
        job = run_with_faults(Path(folder), 2, **FLAGS)
    assert job.exitcodes() == [0, 0]
    return job


def flipped(kind: str, unit: str = "layer 1") -> tuple[Fault, str]:
    """One bit of what arrives is wrong."""
    fault = Fault(rank=DESTINATION, place=Place.ARRIVED, deed=Deed.SPOIL, kind=kind)
    return fault, f"rank 1: {unit} from rank 0: checksum differs, expected 0x"


def refused(rank: int, place: Place, told: str = "") -> tuple[Fault, str]:
    """A rank runs out of memory."""
    return Fault(rank=rank, place=place, deed=Deed.RAISE), f"rank {rank}: {told}{NO_ROOM} ({place.value})"


WHOLE_LAYERS = [
    *map(flipped, ("parameter", "main", "optimizer:exp_avg", "optimizer:exp_avg_sq", "buffer", "extra")),
    refused(SOURCE, Place.EXPORT, "export failed: "),
    refused(DESTINATION, Place.ROOM, "making room failed: "),
    refused(SOURCE, Place.PREPARE),
    refused(DESTINATION, Place.PREPARE),
]
"""(what goes wrong, what the report says), one for each move of a job."""
SHARDED = [
    *map(flipped, ("parameter", "buffer", "extra")),
    *(flipped(f"range {kind}", "optimizer shards") for kind in ("main", "optimizer:exp_avg", "optimizer:exp_avg_sq")),
    refused(SOURCE, Place.OUTLINE, "planning the optimizer's shards failed: "),
    refused(DESTINATION, Place.PREPARE),
]
"""The same with a distributed optimizer, whose state travels in ranges."""


@pytest.mark.parametrize(
    ("noes", "flags"),
    [
        pytest.param(WHOLE_LAYERS, {}, id="whole-layers"),
        pytest.param(SHARDED, OVERLAP, id="distributed-optimizer"),
    ],
)
def test_aborted_moves_leave_the_job_as_it_was_and_the_next_ones_work(tmp_path, noes, flags):
    """One job: a move for each fault, one that a slow rank holds up, and one back to the first layout."""
    faults = [replace(fault, move=number) for number, (fault, _) in enumerate(noes, 1)]
    last = len(noes) + 1
    slow = Fault(rank=SOURCE, place=Place.TRANSFER, deed=Deed.SLEEP, seconds=1.0, move=last)
    moves = ";".join([*(f"{step}:{NEW}" for step in range(1, last + 1)), f"{last + 1}:{OLD}"])
    job = run_with_faults(tmp_path, 2, *faults, slow, **FLAGS, **flags, dyn_layout_at=moves)

    assert job.exitcodes() == [0, 0]
    rounds = list({line["round"]: line for line in job.rounds}.values())
    assert [line["outcome"] for line in rounds] == ["abort"] * len(noes) + ["commit"] * 2
    for line, (_, told) in zip(rounds, noes, strict=False):
        assert line["reason"].startswith(told)
        assert line["layout_after"] == line["layout_before"] == OLD
    assert rounds[-2]["moving_seconds"] >= slow.seconds
    for record in job.records:
        # A trace stands before each step; the first step starts autograd's threads, so that the one before it is no measure.
        _, *aborted, moved, back = record.traces[: last + 2]
        assert aborted == [aborted[0]] * len(noes)
        assert moved["layers"] != aborted[0]["layers"]
        assert back == aborted[0]
    assert job.numbers() == undisturbed().numbers()
    assert whole_state(job.records) == whole_state(undisturbed().records)


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param(
            Fault(rank=SOURCE, place=Place.SEND, deed=Deed.SPOIL),
            [r"rank 0: (sending to rank 1|starting the transfer) failed", "rank 1: receiving from rank 0 failed within 3 s"],
            id="dropped-message",
        ),
        pytest.param(
            Fault(rank=DESTINATION, place=Place.TRANSFER, deed=Deed.SLEEP, seconds=5.0),
            ["rank 0: sending to rank 1 failed within 3 s", r"rank 1: (receiving from rank 0|starting the transfer) failed"],
            id="slow-rank",
        ),
        pytest.param(
            Fault(rank=DESTINATION, place=Place.PLAN, deed=Deed.SPOIL), ["ranks planned differently"] * 2, id="other-plan"
        ),
        pytest.param(
            Fault(rank=DESTINATION, place=Place.REWRAP, deed=Deed.RAISE),
            [rf"commit of layout .* failed, restart from the last checkpoint: rank 1: {NO_ROOM} \(rewrap\)"] * 2,
            id="failed-commit",
        ),
    ],
)
def test_what_cannot_go_on_ends_every_rank_with_one_line_within_the_timeout(tmp_path, fault, told):
    job = run_with_faults(tmp_path, 2, fault, **{**FLAGS, "dyn_timeout_seconds": 3}, dyn_layout_at=f"1:{NEW}")
    assert job.exitcodes() == [1, 1]
    for result, line in zip(job.results, told, strict=True):
        assert re.match(line, error_line(result.output))
    assert job.reaction_seconds < max(3, fault.seconds) + 10
    assert_completed_or_untouched(job, fault.place, num_survivors=1 if fault.place is Place.REWRAP else 2)


@pytest.mark.parametrize(
    ("rank", "place", "told"),
    [
        pytest.param(SOURCE, Place.GATHER, f"plan and manifests: {GONE}", id="source-gather"),
        pytest.param(SOURCE, Place.TRANSFER, CUT_OFF, id="source-transfer"),
        pytest.param(DESTINATION, Place.TRANSFER, CUT_OFF, id="destination-transfer"),
        pytest.param(DESTINATION, Place.VOTE, f"vote on the move: {GONE}", id="destination-vote"),
        pytest.param(SOURCE, Place.COMMIT, f"commit of the move: {GONE}", id="source-commit"),
    ],
)
def test_a_rank_that_is_killed_ends_the_other_at_once_with_one_line(tmp_path, rank, place, told):
    job = run_with_faults(tmp_path, 2, Fault(rank=rank, place=place, deed=Deed.DIE), **FLAGS, dyn_layout_at=f"1:{NEW}")
    assert_killed(job, rank, place, told)


def test_a_rank_without_a_part_in_the_move_is_killed_in_the_commit(tmp_path):
    old, new = "Et*2|t|t|tL", "Et|t*2|t|tL"
    flags = {**FLAGS, "pipeline_model_parallel_size": 4, "num_layers": 5, "pipeline_model_parallel_layout": old}
    job = run_with_faults(tmp_path, 4, Fault(rank=3, place=Place.COMMIT, deed=Deed.DIE), **flags, dyn_layout_at=f"1:{new}")
    assert_killed(job, 3, Place.COMMIT, f"commit of the move: {GONE}", layouts=(old, new))


def test_a_rank_that_is_killed_in_the_first_step_after_a_move_ends_the_other_by_megatrons_own_wait(tmp_path):
    fault = Fault(rank=SOURCE, place=Place.STEP, deed=Deed.DIE)
    job = run_with_faults(tmp_path, 2, fault, **FLAGS, dyn_layout_at=f"1:{NEW}")
    assert job.exitcodes() == [-9, 1]
    assert "Connection" in job.results[1].error.splitlines()[-1]
    assert job.reaction_seconds < 10
    assert [line["outcome"] for line in job.rounds] == ["commit"]
    assert_completed_or_untouched(job, Place.STEP, num_survivors=1)


def test_after_a_rank_is_killed_in_the_commit_the_last_checkpoint_continues_as_if_nothing_had_been(tmp_path):
    flags = {**FLAGS, "ckpt_format": "torch_dist"}
    fault = Fault(rank=DESTINATION, place=Place.REWRAP, deed=Deed.DIE)
    checkpoints = str(tmp_path / "checkpoints")
    job = run_with_faults(tmp_path, 2, fault, **flags, dyn_layout_at=f"3:{NEW}", save=checkpoints, save_interval=2)
    assert_killed(job, DESTINATION, Place.REWRAP, f"commit of the move: {GONE}")

    resumed = run_with_faults(tmp_path / "resumed", 2, **flags, load=checkpoints)
    assert resumed.exitcodes() == [0, 0]
    assert resumed.numbers() == undisturbed().numbers()[2:]
    assert whole_state(resumed.records) == whole_state(undisturbed().records)


def assert_killed(job: FaultyRun, rank: int, place: Place, told: str, layouts: tuple[str, str] = (OLD, NEW)) -> None:
    """Rank `rank` was killed at `place`; all others told so in one line, at once."""
    others = [result for result in job.results if result.rank != rank]
    assert job.exitcodes() == [-9 if each == rank else 1 for each in range(len(job.results))]
    for result in others:
        assert re.match(f"rank {result.rank}: {told}", error_line(result.output))
    assert job.reaction_seconds < 10
    assert_completed_or_untouched(job, place, num_survivors=len(others), layouts=layouts)


def assert_completed_or_untouched(
    job: FaultyRun, place: Place, *, num_survivors: int, layouts: tuple[str, str] = (OLD, NEW)
) -> None:
    """Every rank that can still tell stands at one layout, and what it holds is what the job held before the move."""
    survivors = [record for record in job.records if record.after is not None]
    assert len(survivors) == num_survivors
    layout = Layout.parse(layouts[place in (Place.COMMIT, Place.REWRAP, Place.STEP)], len(job.records))
    for record in survivors:
        assert record.layout == layout.text
        assert record.layers == list(layout.layers_of_stage(record.rank))
    before, after = whole_state(job.records, "before"), whole_state(survivors)
    assert after == {name: before[name] for name in after}


def whole_state(records: Sequence[Record], when: str = "after") -> dict[str, Any]:
    """What all ranks of a job, or those that are left, hold together."""
    return merge(deepcopy([getattr(record, when) for record in records]))


def error_line(output: str) -> str:
    """The plugin's one line, without its prefix; it is the last thing a rank says."""
    *_, line = output.splitlines()
    assert output.count("megatron_dyn: error: ") == 1
    assert "Traceback" not in output
    return line.removeprefix("megatron_dyn: error: ")
