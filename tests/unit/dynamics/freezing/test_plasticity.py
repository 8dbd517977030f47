"""Egeria's decisions against a plain reference, and what the learning rate undoes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.dynamics.freezing.plasticity import PlasticityState, slope, smoothed
from megatron_dyn.dynamics.freezing.settings import EgeriaSettings

SETTINGS = EgeriaSettings(window=2, tolerance=0.3, patience=2)


def observe(state, readings, *, rate=1.0, num_layers=4):
    for reading in readings:
        state = state.observe(reading, learning_rate=rate, num_layers=num_layers, settings=SETTINGS)
    return state


def reference(readings):
    """After which reading the first layer freezes, by numpy; None for never."""
    slopes, settled = [], 0
    for end in range(2 * SETTINGS.window, len(readings) + 1):
        recent = readings[end - 2 * SETTINGS.window : end]
        means = [np.mean(recent[start : start + SETTINGS.window]) for start in range(SETTINGS.window + 1)]
        steepness = abs(np.polyfit(range(len(means)), means, 1)[0])
        if len(slopes) < 3:
            slopes.append(steepness)
        settled = settled + 1 if len(slopes) == 3 and steepness <= SETTINGS.tolerance * max(slopes) + 1e-12 else 0
        if settled == SETTINGS.patience:
            return end
    return None


@given(st.lists(st.integers(0, 8).map(float), min_size=4, max_size=30))
def test_a_layer_freezes_when_the_fitted_slope_has_settled(readings):
    state, frozen_at = PlasticityState(), None
    for count, reading in enumerate(readings, start=1):
        state = observe(state, [reading])
        if state.num_frozen:
            frozen_at = count
            break
    assert frozen_at == reference(readings)


def test_the_next_layer_starts_anew_and_the_last_never_freezes():
    curve = [9.0, 7.0, 5.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    state = PlasticityState()
    for expected in (1, 2, 3, 3):
        state = observe(state, curve)
        assert state.num_frozen == expected
    assert state.num_frozen == 3


def test_all_train_again_once_the_learning_rate_has_dropped():
    frozen = PlasticityState(num_frozen=2, rate_at_freezing=1.0)
    assert frozen.follow_rate(0.11, SETTINGS) == frozen
    assert frozen.follow_rate(0.1, SETTINGS) == PlasticityState()
    assert PlasticityState().follow_rate(0.0, SETTINGS) == PlasticityState()


def test_lines_are_fitted_by_least_squares():
    assert smoothed([1.0, 3.0, 5.0], 2) == [2.0, 4.0]
    assert slope([1.0, 3.0, 2.0, 6.0]) == pytest.approx(np.polyfit(range(4), [1.0, 3.0, 2.0, 6.0], 1)[0])
    assert slope([4.0]) == 0.0
