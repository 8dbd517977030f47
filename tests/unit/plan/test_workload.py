"""What a layout makes of a workload: chunk times with their ends, speeds and boundaries, and bytes."""

from dataclasses import replace

import pytest

from megatron_dyn.plan import Workload, workload_of
from megatron_dyn.records import Cost, Layout, LayoutError, Snapshot, StageReading


def piece(forward: float, size: int) -> Cost:
    return Cost(
        forward_seconds=forward,
        backward_seconds=2 * forward,
        optimizer_seconds=forward / 4,
        state_bytes=size,
        activation_bytes=10 * size,
    )


WORK = Workload(
    layers=tuple(piece(2.0**layer, layer + 1) for layer in range(4)),
    embedding=piece(100.0, 100),
    head=piece(200.0, 200),
    mtp=piece(300.0, 300),
    other_seconds=0.5,
    num_microbatches=8,
)


def test_ends_count_on_the_chunks_that_hold_them() -> None:
    times = WORK.chunk_times(Layout.parse("Et|tt|tm|L", 2))
    assert times.forward_seconds == (101.25, 6.25, 308.25, 200.25)
    assert times.backward_seconds == (202.25, 12.25, 616.25, 400.25)
    assert times.optimizer_seconds == ((101.0 + 308.0) / 4, (6.0 + 200.0) / 4)
    assert times.stage_seconds == (303.5 + 924.5, 18.5 + 600.5)
    assert WORK.state_bytes(Layout.parse("Et|tt|tm|L", 2)) == (101, 5, 304, 200)
    assert WORK.activation_bytes(Layout.parse("Ett|ttmL", 2)) == (1030, 5070)


def test_a_slow_rank_takes_longer_for_all_its_chunks() -> None:
    slow = replace(WORK, speeds=(1.0, 0.5))
    assert slow.chunk_times(Layout.parse("Et|tt|tm|L", 2)).forward_seconds == (101.25, 12.5, 308.25, 400.5)


@pytest.mark.parametrize(
    ("p2p", "layout", "expected"),
    [
        (0.5, "Et|t|ttmL", (0.5, 0.5)),
        ((0.5, 0.25), "Et|t|ttmL", (0.5, 0.25)),
        ((0.5, 0.25, 4.0), "Et|t|ttmL", (0.5, 0.25)),
        ((0.5, 0.25, 4.0), "Et|t|t|t||mL", (0.5, 0.25, 4.0, 0.5, 0.25)),
    ],
)
def test_boundaries(p2p: float | tuple[float, ...], layout: str, expected: tuple[float, ...]) -> None:
    assert replace(WORK, p2p_seconds=p2p).chunk_times(Layout.parse(layout, 3)).p2p_seconds == expected


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="p2p_seconds: expected a number or 2 numbers, got 1"):
        replace(WORK, p2p_seconds=(0.5,)).chunk_times(Layout.parse("Et|t|ttmL", 3))
    with pytest.raises(LayoutError, match="places 3 layers, the model has 4"):
        WORK.chunk_times(Layout.parse("Et|ttmL", 2))


def test_a_snapshot_becomes_a_workload_with_slow_ranks_taken_out() -> None:
    stage = StageReading(
        forward_seconds=0.0,
        backward_seconds=0.0,
        wait_seconds=0.0,
        optimizer_seconds=6.0,
        state_bytes=12,
        activation_bytes=0,
    )
    snapshot = Snapshot(
        iteration=1,
        layout=Layout.parse("Et|t|t|tL", 2),
        layers=tuple(Cost(forward_seconds=1.0, backward_seconds=2.0, state_bytes=4) for _ in range(4)),
        embedding=Cost(forward_seconds=1.0),
        head=Cost(forward_seconds=1.0),
        other_seconds=1.0,
        stages=(stage, stage),
        step_seconds=0.0,
        num_microbatches=8,
    )
    work = workload_of(snapshot, speeds=(1.0, 0.5))
    assert [cost.forward_seconds for cost in work.layers] == [1.0, 0.5, 1.0, 0.5]
    assert [cost.optimizer_seconds for cost in work.layers] == [2.0, 1.0, 2.0, 1.0]
    assert (work.embedding.seconds, work.head.seconds, work.other_seconds) == (1.0, 0.5, 0.5)
    # What was measured comes out again where it was measured.
    assert work.chunk_times(snapshot.layout).forward_seconds == (2.25, 1.5, 1.25, 2.5)
    assert workload_of(snapshot).speeds is None
