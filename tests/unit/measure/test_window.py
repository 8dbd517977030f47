"""Window and StepTimes: newest readings only, medians, warm-up."""

import pytest

from megatron_dyn.config import MeasureConfig
from megatron_dyn.measure import IDLE, Kind, Slot, StepReading, StepTimes, Window, is_sampled

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
    window.add(reading({LAYER: 1.0}, num_microbatches=8))
    assert (window.full, window.num_microbatches) == (False, 8)
    window.add(reading({LAYER: 1.0}, num_microbatches=8))
    assert (window.full, window.num_microbatches) == (True, 8)
    window.clear()
    assert (len(window), window.full, window.medians()) == (0, False, {})


def test_a_changed_number_of_microbatches_begins_the_window_anew():
    window = Window(3)
    for seconds in (10.0, 11.0, 12.0):
        window.add(reading({LAYER: seconds}, num_microbatches=4))
    window.add(reading({LAYER: 1.0}, num_microbatches=8))
    assert (len(window), window.full, window.num_microbatches, window.medians()) == (1, False, 8, {LAYER: 1.0})
    window.add(reading({LAYER: 3.0}, num_microbatches=8))
    assert (len(window), window.num_microbatches, window.medians()) == (2, 8, {LAYER: 2.0})
    window.add(reading({LAYER: 7.0}, num_microbatches=4))
    assert (len(window), window.num_microbatches, window.medians()) == (1, 4, {LAYER: 7.0})


def test_step_times_drop_the_warmup_and_take_the_median():
    times = StepTimes(warmup_steps=2)
    assert (times.median_seconds, times.warm, len(times)) == (None, False, 0)
    for seconds in (90.0, 80.0):
        times.add(seconds)
    assert (times.median_seconds, times.warm, len(times)) == (None, True, 0)
    for seconds in (1.0, 5.0, 2.0):
        times.add(seconds)
    assert (times.median_seconds, len(times)) == (2.0, 3)


def test_a_sampled_step_counts_towards_the_warmup_like_any_other():
    times = StepTimes(warmup_steps=1)
    times.add(90.0, sampled=True)
    assert (times.warm, times.median_seconds, len(times)) == (True, None, 0)
    times.add(3.0)
    assert (times.median_seconds, len(times)) == (3.0, 1)


def test_where_every_step_is_sampled_those_count():
    times = StepTimes(warmup_steps=1)
    for seconds in (90.0, 4.0, 9.0, 5.0):
        times.add(seconds, sampled=True)
    assert (times.median_seconds, len(times)) == (5.0, 3)


@pytest.mark.parametrize("sampled_first", [True, False])
def test_sampled_steps_do_not_count_where_a_plain_one_does(sampled_first):
    times = StepTimes(warmup_steps=0)
    if sampled_first:
        times.add(50.0, sampled=True)
        times.add(60.0, sampled=True)
    times.add(2.0)
    times.add(70.0, sampled=True)
    times.add(80.0, sampled=True)
    times.add(4.0)
    assert (times.median_seconds, len(times)) == (3.0, 2)


@pytest.mark.parametrize("sampled", [False, True])
def test_restart_begins_a_new_warmup_and_forgets_all_steps(sampled):
    times = StepTimes(warmup_steps=1)
    for _ in range(3):
        times.add(7.0, sampled=sampled)
    times.restart()
    assert (times.warm, times.median_seconds, len(times)) == (False, None, 0)
    times.add(100.0, sampled=sampled)
    assert (times.warm, times.median_seconds, len(times)) == (True, None, 0)
    times.add(2.0, sampled=sampled)
    assert times.median_seconds == 2.0


@pytest.mark.parametrize("sampled", [False, True])
def test_only_the_newest_steps_count(sampled):
    times = StepTimes(warmup_steps=0)
    assert StepTimes.SIZE == 32
    for _ in range(StepTimes.SIZE):
        times.add(100.0, sampled=sampled)
    for seconds in range(StepTimes.SIZE - 1):
        times.add(float(seconds), sampled=sampled)
    assert (times.median_seconds, len(times)) == (15.5, StepTimes.SIZE)
    times.add(31.0, sampled=sampled)
    assert (times.median_seconds, len(times)) == (15.5, StepTimes.SIZE)
    times.add(32.0, sampled=sampled)
    assert (times.median_seconds, len(times)) == (16.5, StepTimes.SIZE)


@pytest.mark.parametrize("sampled", [False, True])
def test_forgotten_times_need_no_new_warmup(sampled):
    times = StepTimes(warmup_steps=1)
    for seconds in (9.0, 4.0):
        times.add(seconds, sampled=sampled)
    times.forget()
    assert (times.median_seconds, len(times), times.warm) == (None, 0, True)
    times.add(2.0, sampled=sampled)
    assert times.median_seconds == 2.0


@pytest.mark.parametrize("sampled", [False, True])
def test_no_warmup_is_warm_at_once(sampled):
    times = StepTimes(warmup_steps=0)
    assert times.warm
    times.add(4.0, sampled=sampled)
    assert times.median_seconds == 4.0


@pytest.mark.parametrize("interval", [1, 2, 5, 7, 10, 100])
def test_one_step_of_every_interval_is_sampled(interval):
    sampled = [step for step in range(1, 50 * interval + 1) if is_sampled(step, interval)]
    assert [(step - 1) // interval for step in sampled] == list(range(50))
    assert len({(step - 1) % interval for step in sampled}) == min(50, interval)


@pytest.mark.parametrize("num_places", [2, 3, 4, 8])
@pytest.mark.parametrize("steps_at_a_place", [1, 2, 3, 5])
def test_a_window_of_samples_rarely_finds_what_wanders_in_one_place(num_places, steps_at_a_place):
    interval, size = MeasureConfig().interval_steps, MeasureConfig().window_samples
    places = [(step // steps_at_a_place) % num_places for step in range(1, 20_001) if is_sampled(step, interval)]
    windows = [places[start : start + size] for start in range(0, len(places) - size, size)]
    assert sum(len(set(window)) == 1 for window in windows) <= 2 * len(windows) / num_places ** (size - 1) + 2
