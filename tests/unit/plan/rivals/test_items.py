"""Layers become items and stages become rooms without losing a layer, a constraint or a bit of a cost."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, SplitProblem
from megatron_dyn.plan.rivals.answers import NotApplicable
from megatron_dyn.plan.rivals.items import items_of, load_units, speed_units, units_to_seconds
from tests.unit.plan.cases import hard_problems, is_allowed


@given(st.floats(1e-9, 1e6))
def test_a_load_is_exact(seconds):
    assert Fraction(load_units(seconds), 2**100) == Fraction(seconds)
    assert units_to_seconds(load_units(seconds), speed_units(1.0)) == seconds


def test_a_stage_of_half_the_speed_takes_twice_as_long():
    assert units_to_seconds(load_units(3.0), speed_units(0.5)) == 6.0
    assert speed_units(1e-300) == 1


def test_layers_that_belong_together_are_one_item_and_pinned_ones_none():
    problem = SplitProblem(
        layer_seconds=(1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
        num_stages=3,
        first_seconds=0.5,
        uncut=(1, 3),
        pinned_first=1,
        pinned_last=1,
        memory=MemoryBudget(
            state_bytes=(1, 2, 3, 4, 5, 6), activation_bytes=(1,) * 6, in_flight=(3, 2, 1), first_bytes=7, cap_bytes=50
        ),
    )
    found = items_of(problem, by_parameters=False)
    # Layer 1 must not be cut off from layer 0, which is pinned.
    assert [(item.num_layers, item.load, item.state_bytes) for item in found.items] == [
        (2, load_units(12.0), 7),
        (1, load_units(16.0), 5),
    ]
    assert [(room.pinned_layers, room.load, room.min_items) for room in found.rooms] == [
        (2, load_units(3.5), 0),
        (0, 0, 1),
        (1, load_units(32.0), 0),
    ]
    assert [room.held_bytes for room in found.rooms] == [7 + 3 + 3 * 2, 0, 6 + 1]
    assert found.layer_counts((0, 2, 0)) == (2, 3, 1)


@given(hard_problems())
def test_the_nearest_split_is_allowed_and_an_allowed_one_is_its_own_nearest(problem):
    try:
        items = items_of(problem, by_parameters=False)
    except InfeasibleSplit:
        return
    current = problem.current or (0,) * (problem.num_stages - 1) + (len(problem.layer_seconds),)
    nearest = items.layer_counts(items.nearest_items(current))
    free = SplitProblem(
        layer_seconds=problem.layer_seconds,
        num_stages=problem.num_stages,
        uncut=problem.uncut,
        pinned_first=problem.pinned_first,
        pinned_last=problem.pinned_last,
        min_layers=problem.min_layers,
    )
    assert is_allowed(free, nearest)
    assert not is_allowed(free, current) or nearest == current


def test_what_cannot_be_is_refused_at_once():
    with pytest.raises(InfeasibleSplit, match="at least 8 layers .* to leave none of 8 stages empty, got 4"):
        items_of(SplitProblem(layer_seconds=(1.0,) * 4, num_stages=8), by_parameters=False)
    with pytest.raises(InfeasibleSplit, match="at most 3 layers pinned to the first and last stage, got 3 and 3"):
        items_of(
            SplitProblem(layer_seconds=(1.0,) * 3, num_stages=2, pinned_first=1, pinned_last=1, uncut=(1, 2)),
            by_parameters=False,
        )
    with pytest.raises(NotApplicable, match="expected the parameters of each layer, got none"):
        items_of(SplitProblem(layer_seconds=(1.0,) * 3, num_stages=2), by_parameters=True)
