"""Recorder: every moment of a step belongs to exactly one slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.measure import IDLE, Kind, Recorder, Slot
from megatron_dyn.testing.fakes import FakeClock

SLOTS = [
    IDLE,
    Slot(Kind.LAYER, 3),
    Slot(Kind.LAYER, 3, backward=True),
    Slot(Kind.HEAD),
    Slot(Kind.OTHER),
    Slot(Kind.WAIT),
    Slot(Kind.OPTIMIZER),
]


@given(st.lists(st.tuples(st.sampled_from(SLOTS), st.integers(0, 1000)), max_size=30), st.integers(0, 1000))
def test_slots_sum_to_the_step_whatever_the_order_of_switches(switches, first):
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.begin()
    clock.advance(first)
    expected = {IDLE: float(first)}
    for slot, seconds in switches:
        recorder.switch(slot)
        clock.advance(seconds)
        expected[slot] = expected.get(slot, 0.0) + seconds
    reading = recorder.end(7)
    assert reading.seconds == expected
    assert sum(reading.seconds.values()) == first + sum(seconds for _, seconds in switches)
    assert reading.iteration == 7


def test_a_nested_piece_is_not_counted_in_the_piece_around_it():
    clock = FakeClock()
    recorder = Recorder(clock)
    recorder.begin()
    assert recorder.switch(Slot(Kind.HEAD)) == IDLE
    clock.advance(1)
    outer = recorder.switch(Slot(Kind.WAIT))
    assert outer == Slot(Kind.HEAD)
    clock.advance(10)
    inner = recorder.switch(Slot(Kind.LAYER, 0))
    assert (inner, recorder.current) == (Slot(Kind.WAIT), Slot(Kind.LAYER, 0))
    clock.advance(100)
    recorder.switch(inner)
    clock.advance(20)
    recorder.switch(outer)
    clock.advance(2)
    seconds = recorder.end(1).seconds
    assert seconds == {IDLE: 0, Slot(Kind.HEAD): 3, Slot(Kind.WAIT): 30, Slot(Kind.LAYER, 0): 100}


def test_steps_are_apart_and_time_between_them_belongs_to_none():
    clock = FakeClock()
    recorder = Recorder(clock)
    for step in (1, 2):
        clock.advance(1000)
        recorder.begin()
        recorder.count_microbatch()
        recorder.switch(Slot(Kind.LAYER, step))
        clock.advance(step)
        reading = recorder.end(step)
        assert reading.seconds == {IDLE: 0, Slot(Kind.LAYER, step): step}
        assert reading.num_microbatches == 1
        assert recorder.current == IDLE


@pytest.mark.parametrize(("counted", "expected"), [(0, 1), (1, 1), (8, 8)])
def test_microbatches_are_counted_and_never_zero(counted, expected):
    recorder = Recorder(FakeClock())
    recorder.begin()
    for _ in range(counted):
        recorder.count_microbatch()
    assert recorder.end(1).num_microbatches == expected


def test_marks_are_read_only_after_they_settled():
    # FakeClock raises for an unsettled mark, as CUDA events do; here it shows that the fake itself can tell.
    clock = FakeClock()
    start = clock.mark()
    clock.advance(1)
    with pytest.raises(AssertionError, match="before settle"):
        clock.seconds_between(start, clock.mark())
