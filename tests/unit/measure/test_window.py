"""Window and StepTimes: newest readings only, medians, warm-up."""

import pytest

from megatron_dyn.measure import IDLE, Kind, Slot, StepReading, StepTimes, Window

LAYER = Slot(Kind.LAYER, 0)


def reading(seconds, *, step=1, num_microbatches=4):
    return StepReading(iteration=step, num_microbatches=num_microbatches, seconds=seconds)


def test_median_of_every_slot():
    window = Window(3)
    for layer, idle in ((1.0, 9.0), (50.0, 7.0), (3.0, 8.0)):
        window.add(reading({LAYER: layer, IDLE: idle}))
    assert window.medians() == {LAYER: 3.0, IDLE: 8.0}


def test_a_slot_that_a_step_lacks_counts_as_zero_there():
    window = Window(3)
    window.add(reading({LAYER: 1.0}))
    window.add(reading({IDLE: 2.0}))
    window.add(reading({IDLE: 4.0}))
    assert window.medians() == {LAYER: 0.0, IDLE: 2.0}


def test_the_oldest_reading_falls_out():
    window = Window(2)
    for seconds in (100.0, 1.0, 3.0):
        window.add(reading({LAYER: seconds}))
    assert window.medians() == {LAYER: 2.0}
    assert (len(window), window.full) == (2, True)


def test_full_only_with_as_many_readings_as_it_holds_and_empty_after_clear():
    window = Window(2)
    assert (len(window), window.full, window.num_microbatches, window.medians()) == (0, False, 0, {})
    window.add(reading({LAYER: 1.0}, num_microbatches=4))
    assert not window.full
    window.add(reading({LAYER: 1.0}, num_microbatches=8))
    assert (window.full, window.num_microbatches) == (True, 8)
    window.clear()
    assert (len(window), window.full, window.medians()) == (0, False, {})


def test_step_times_drop_the_warmup_and_take_the_median():
    times = StepTimes(warmup_steps=2)
    assert (times.median_seconds, times.warm, len(times)) == (None, False, 0)
    for seconds in (90.0, 80.0):
        times.add(seconds)
    assert (times.median_seconds, times.warm, len(times)) == (None, True, 0)
    for seconds in (1.0, 5.0, 2.0):
        times.add(seconds)
    assert (times.median_seconds, len(times)) == (2.0, 3)


def test_a_sampled_step_counts_towards_the_warmup_but_its_time_does_not():
    times = StepTimes(warmup_steps=1)
    times.skip()
    assert (times.warm, times.median_seconds) == (True, None)
    times.add(3.0)
    assert times.median_seconds == 3.0


def test_restart_begins_a_new_warmup():
    times = StepTimes(warmup_steps=1)
    for _ in range(3):
        times.add(7.0)
    times.restart()
    assert (times.warm, times.median_seconds, len(times)) == (False, None, 0)
    times.add(100.0)
    times.add(2.0)
    assert times.median_seconds == 2.0


def test_only_the_newest_steps_count():
    times = StepTimes(warmup_steps=0, size=3)
    for seconds in (100.0, 100.0, 1.0, 2.0, 3.0):
        times.add(seconds)
    assert (times.median_seconds, len(times)) == (2.0, 3)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_warmup_is_warm_at_once(size):
    times = StepTimes(warmup_steps=0, size=size)
    assert times.warm
    times.add(4.0)
    assert times.median_seconds == 4.0
