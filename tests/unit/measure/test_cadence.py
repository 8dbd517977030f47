"""When to sample and when a round is due, by policy."""

import pytest

from megatron_dyn.config import MeasureConfig, RebalancePolicy
from megatron_dyn.measure import Cadence


def cadence_of(policy, *, interval=5, window=3, cooldown=20):
    return Cadence(
        policy=RebalancePolicy.parse(policy),
        measure=MeasureConfig(interval_steps=interval, window_samples=window),
        cooldown_steps=cooldown,
    )


def sampled(cadence, last):
    return [step for step in range(1, last + 1) if cadence.wants_sample(step, warm=True)]


def due(cadence, first, last=None, *, window_full=True, steps_since_move=None):
    return cadence.round_due(first, last or first, window_full=window_full, steps_since_move=steps_since_move)


def test_auto_samples_one_step_of_each_interval():
    steps = sampled(cadence_of("auto", interval=5), 50)
    assert [(step - 1) // 5 for step in steps] == list(range(10))


def test_scheduled_modes_sample_the_steps_before_a_round():
    assert sampled(cadence_of("every:10", window=3), 20) == [8, 9, 10, 18, 19, 20]
    assert sampled(cadence_of("at:4,12", window=2), 20) == [3, 4, 11, 12]


@pytest.mark.parametrize("policy", ["auto", "every:1", "at:1"])
def test_nothing_is_sampled_in_the_warm_up(policy):
    assert not cadence_of(policy, interval=1).wants_sample(1, warm=False)
    assert cadence_of(policy, interval=1).wants_sample(1, warm=True)


@pytest.mark.parametrize(
    ("policy", "expected"), [("auto", list(range(1, 21))), ("every:10", [8, 9, 10, 18, 19, 20]), ("off", [])]
)
def test_costs_that_have_just_changed_are_sampled_in_every_step_where_the_round_waits_for_them(policy, expected):
    cadence = cadence_of(policy)
    assert [step for step in range(1, 21) if cadence.wants_sample(step, warm=True, eager=True)] == expected
    assert not cadence.wants_sample(10, warm=False, eager=True)


def test_off_does_nothing():
    assert sampled(cadence_of("off", interval=1), 20) == []
    assert not due(cadence_of("off"), 10)


def test_auto_is_due_with_a_full_window_outside_of_the_cool_down():
    cadence = cadence_of("auto", cooldown=20)
    assert due(cadence, 7)
    assert not due(cadence, 7, window_full=False)
    assert not due(cadence, 7, steps_since_move=19)
    assert due(cadence, 7, steps_since_move=20)


def test_scheduled_rounds_are_due_at_their_steps_whatever_the_window_holds():
    every, at = cadence_of("every:10"), cadence_of("at:4,12")
    assert [step for step in range(1, 31) if due(every, step, window_full=False, steps_since_move=0)] == [10, 20, 30]
    assert [step for step in range(1, 31) if due(at, step, window_full=False, steps_since_move=0)] == [4, 12]


def test_a_step_that_was_skipped_is_due_at_the_next():
    assert due(cadence_of("every:10"), 9, 13)
    assert not due(cadence_of("every:10"), 11, 13)
    assert due(cadence_of("at:12"), 11, 14)
