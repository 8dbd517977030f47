"""AutoFreeze against a plain reference of the paper's rule, on random histories."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.dynamics.freezing.autofreeze import AutoFreezeState, evaluation_due, percentile_of
from megatron_dyn.dynamics.freezing.settings import AutoFreezeSettings


def reference(history, steps_per_interval, percentile):
    """The paper's section 4.1 with numpy: how many layers are frozen after each interval of a history [steps][layers]."""
    table, frozen, counts = np.array(history), 0, []
    sums = [table[start : start + steps_per_interval].sum(axis=0) for start in range(0, len(table), steps_per_interval)]
    for before, now in zip(sums, sums[1:], strict=False):
        eta = np.abs(before - now) / before
        bar = np.percentile(eta[frozen:], percentile)
        while frozen < len(eta) - 1 and eta[frozen] < bar:
            frozen += 1
        counts.append(frozen)
    return counts


@given(
    st.integers(2, 6).flatmap(
        lambda layers: st.lists(st.lists(st.integers(1, 50), min_size=layers, max_size=layers), min_size=4, max_size=24)
    ),
    st.integers(1, 3),
    st.sampled_from([0, 30, 50, 80, 100]),
)
def test_it_freezes_what_the_paper_freezes(history, steps_per_interval, percentile):
    history = history[: len(history) // steps_per_interval * steps_per_interval]
    state, counts = AutoFreezeState(), []
    for step, norms in enumerate(history, start=1):
        state = state.observe([float(norm) for norm in norms])
        if step % steps_per_interval == 0:
            state = state.evaluate(percentile)
            counts.append(state.num_frozen)
    # Whole numbers have exact sums; the quotients are the same operations in both.
    assert counts[1:] == reference(history, steps_per_interval, percentile)


def test_a_step_that_overflowed_does_not_count():
    state = AutoFreezeState().observe([1.0, 2.0])
    assert state.observe([math.inf, 1.0]) == state.observe([math.nan, 1.0]) == state


def test_evaluations_are_spread_evenly_over_the_run():
    due = [step for step in range(1, 101) if evaluation_due(step, 100, AutoFreezeSettings(evaluations=5))]
    assert due == [20, 40, 60, 80, 100]
    assert evaluation_due(1, 3, AutoFreezeSettings(evaluations=20))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=9), st.floats(0, 100))
def test_percentiles_are_numpys(values, percentile):
    assert percentile_of(values, percentile) == pytest.approx(np.percentile(values, percentile), rel=1e-9, abs=1e-9)
