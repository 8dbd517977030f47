"""The cubic schedule against equation 1 of arXiv 1710.01878, and its end, which the paper's released code misses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.dynamics.pruning.schedule import Schedule


def equation_1(step, *, t0, n, dt, initial, final):
    return final + (initial - final) * (1 - (step - t0) / (n * dt)) ** 3


@given(
    t0=st.integers(0, 50), n=st.integers(1, 30), dt=st.integers(1, 20), initial=st.floats(0, 0.5), rise=st.floats(0.01, 0.49)
)
def test_levels_are_those_of_the_equation(t0, n, dt, initial, rise):
    schedule = Schedule(start=t0, end=t0 + n * dt, every=dt, initial=initial, final=initial + rise)
    for step in range(t0, t0 + n * dt + 1, dt):
        expected = equation_1(step, t0=t0, n=n, dt=dt, initial=initial, final=initial + rise)
        assert schedule.level(step) == pytest.approx(expected, abs=1e-12)


@given(start=st.integers(0, 40), span=st.integers(1, 90), every=st.integers(1, 40), final=st.floats(0.01, 0.99))
def test_the_final_level_is_reached_exactly_whatever_every_is(start, span, every, final):
    schedule = Schedule(start=start, end=start + span, every=every, initial=0.0, final=final)
    assert schedule.steps[-1] == start + span
    assert schedule.level(schedule.steps[-1]) == final == schedule.level(10**6)
    levels = [schedule.level(step) for step in range(start + span + 2)]
    assert levels == sorted(levels)
    assert {step for step in range(1, start + span + 2) if levels[step] > levels[step - 1]} <= set(schedule.steps)


def test_the_setting_of_the_papers_script_ends_at_ninety_percent():
    schedule = Schedule(start=3000, end=7000, every=1000, initial=0.0, final=0.9)
    assert schedule.steps == (4000, 5000, 6000, 7000)
    assert [round(schedule.level(step), 4) for step in schedule.steps] == [0.5203, 0.7875, 0.8859, 0.9]


def test_an_initial_level_is_in_force_from_the_start():
    schedule = Schedule(start=5, end=9, every=3, initial=0.2, final=0.8)
    assert schedule.steps == (5, 8, 9)
    assert (schedule.level(4), schedule.level(5), schedule.level(7)) == (0.0, pytest.approx(0.2), pytest.approx(0.2))
