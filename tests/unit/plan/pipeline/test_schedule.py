"""The order of operations: hand-written schedules, and what must hold for all."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import Op, Phase, in_flight_by_chunk, operations
from megatron_dyn.plan.pipeline.schedule import Schedule

PATIENT = settings(deadline=None)


@st.composite
def schedules(draw: st.DrawFn, forward_only: bool | None = None) -> Schedule:
    """Any shape that Megatron accepts, up to five stages."""
    num_stages, num_virtual = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    evaluation = draw(st.booleans()) if forward_only is None else forward_only
    if num_stages == 1 or num_virtual == 1:
        return Schedule(num_stages=num_stages, num_microbatches=draw(st.integers(1, 12)), forward_only=evaluation)
    group = draw(st.integers(num_stages, num_stages + 3))
    rest = draw(st.one_of(st.just(0), st.integers(num_stages, group)))
    return Schedule(
        num_stages=num_stages,
        num_microbatches=draw(st.integers(1, 3)) * group + rest % group,
        num_virtual=num_virtual,
        group_size=group,
        forward_only=evaluation,
    )


def text(schedule: Schedule, pp_rank: int) -> str:
    """Operations as in the literature: F or B, chunk, micro-batch."""
    return " ".join(f"{op.phase.value[0].upper()}{op.chunk}.{op.microbatch}" for op in schedule.operations(pp_rank))


def test_one_forward_one_backward():
    """Rank 0 of two runs one forward ahead, the last rank none; with one micro-batch nothing alternates."""
    schedule = Schedule(num_stages=2, num_microbatches=3)
    assert text(schedule, 0) == "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2"
    assert text(schedule, 1) == "F1.0 B1.0 F1.1 B1.1 F1.2 B1.2"
    assert text(Schedule(num_stages=3, num_microbatches=1), 0) == "F0.0 B0.0"


def test_interleaved_order():
    """Groups of two: each chunk of a rank runs both before the other has its turn; backwards with the chunks reversed."""
    schedule = Schedule(num_stages=2, num_microbatches=4, num_virtual=2)
    assert text(schedule, 1) == "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3"
    assert text(schedule, 0).startswith("F0.0 F0.1 F2.0 F2.1 F0.2 B2.0")


def test_groups_as_in_megatrons_own_example():
    """PP 2, groups of 3, 5 micro-batches: 0 1 2 0 1 2 3 4 3 4."""
    schedule = Schedule(num_stages=2, num_microbatches=5, num_virtual=2, group_size=3, forward_only=True)
    assert [op.microbatch for op in schedule.operations(0)] == [0, 1, 2, 0, 1, 2, 3, 4, 3, 4]
    assert [op.chunk for op in schedule.operations(1)] == [1, 1, 1, 3, 3, 3, 1, 1, 3, 3]


@PATIENT
@given(schedules())
def test_every_operation_runs_once_and_backward_after_forward(schedule):
    for pp_rank in range(schedule.num_stages):
        order = list(schedule.operations(pp_rank))
        phases = [Phase.FORWARD] if schedule.forward_only else list(Phase)
        expected = {
            Op(phase=phase, chunk=chunk, microbatch=microbatch)
            for phase in phases
            for chunk in range(pp_rank, schedule.num_chunks, schedule.num_stages)
            for microbatch in range(schedule.num_microbatches)
        }
        assert len(order) == len(expected)
        assert set(order) == expected
        place = {op: position for position, op in enumerate(order)}
        assert all(
            place[Op(phase=Phase.FORWARD, chunk=op.chunk, microbatch=op.microbatch)] < place[op]
            for op in order
            if op.phase is Phase.BACKWARD
        )


@PATIENT
@given(schedules(forward_only=False))
def test_in_flight_is_the_most_that_a_chunk_ever_holds(schedule):
    found = in_flight_by_chunk(schedule.num_microbatches, schedule.num_stages, schedule.num_virtual, schedule.group_size)
    for pp_rank in range(schedule.num_stages):
        held: Counter[int] = Counter()
        peak: Counter[int] = Counter()
        for op in schedule.operations(pp_rank):
            held[op.chunk] += 1 if op.phase is Phase.FORWARD else -1
            peak |= held
        chunks = range(pp_rank, schedule.num_chunks, schedule.num_stages)
        assert [found[chunk] for chunk in chunks] == [peak[chunk] for chunk in chunks]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 1), (4, 8), (4, 2), (7, 7)])
def test_in_flight_without_virtual_stages(num_stages, num_microbatches):
    assert in_flight_by_chunk(num_microbatches, num_stages) == tuple(
        min(num_microbatches, num_stages - stage) for stage in range(num_stages)
    )


def test_the_function_is_the_schedule():
    order = operations(1, num_stages=2, num_virtual=2, num_microbatches=5, group_size=3, forward_only=True)
    schedule = Schedule(num_stages=2, num_microbatches=5, num_virtual=2, group_size=3, forward_only=True)
    assert order == tuple(schedule.operations(1))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"num_stages": 0}, "num_stages: expected at least 1, got 0"),
        ({"num_microbatches": 0}, "num_microbatches: expected at least 1, got 0"),
        ({"num_virtual": 0}, "num_virtual: expected at least 1, got 0"),
        ({"num_stages": 1, "num_virtual": 2}, "at least 2 pipeline stages, got 1"),
        ({"num_virtual": 2, "num_microbatches": 3}, "between the 4 stages and the 3 micro-batches in size, got 4"),
        ({"num_virtual": 2, "group_size": 3}, "between the 4 stages and the 8 micro-batches in size, got 3"),
        ({"num_virtual": 2, "group_size": 9}, "between the 4 stages and the 8 micro-batches in size, got 9"),
        ({"num_virtual": 2, "num_microbatches": 9}, r"at least 4, one for each stage, got 1 \(9 in groups of 4\)"),
    ],
)
def test_shapes_that_megatron_refuses(shape, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**{"num_stages": 4, "num_microbatches": 8, **shape})


def test_a_rank_that_is_not_there():
    with pytest.raises(ValueError, match="pp_rank: expected 0 to 1, got 2"):
        operations(2, num_stages=2, num_virtual=1, num_microbatches=1)
