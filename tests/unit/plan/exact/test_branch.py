"""The tree has every split once, and no other; and it says when it was not seen to its end."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.branch import OutOfSteps, Tree
from megatron_dyn.plan.exact.tables import tables_of
from megatron_dyn.plan.problem import SplitProblem
from tests.unit.plan.brute_force import PATIENT, REAL_TIMES, SMALL_TIMES, all_counts, problems

SMALL = problems(SMALL_TIMES | REAL_TIMES, max_layers=7, stages=st.integers(1, 3), chunks=st.integers(1, 5))


@settings(PATIENT, max_examples=50)
@given(SMALL, st.integers(0, 100))
def test_it_has_every_split_within_a_bound(problem: SplitProblem, percent: int) -> None:
    """In the order of their boundaries, by trying all."""
    tables = tables_of(problem)
    bound = tables.longest() * percent // 100
    every = (tables.ends(counts) for counts in all_counts(len(problem.layer_seconds), problem.num_runs, problem.min_layers))
    expected = [ends for ends in every if ends is not None and tables.allows(ends, bound)]
    assert list(Tree(tables, max_steps=10**6).all_within(bound)) == sorted(expected)
    found = Tree(tables, max_steps=10**6).any_within(bound)
    assert (found in expected) if expected else (found is None)


@settings(PATIENT, max_examples=80)
@given(SMALL)
def test_ever_lower_bounds_end_at_the_best(problem: SplitProblem) -> None:
    """What it remembers of earlier bounds hides nothing."""
    tables = tables_of(problem)
    tree = Tree(tables, max_steps=10**6)
    bound, peaks = tables.longest(), [tables.peak(ends) for ends in Tree(tables, max_steps=10**6).all_within(tables.longest())]
    while (ends := tree.any_within(bound)) is not None:
        bound = tables.peak(ends) - 1
    assert bound == (min(peaks) - 1 if peaks else tables.longest())


def test_it_gives_up_after_its_steps() -> None:
    """Rather than to answer for what it did not see; the steps of all calls count together."""
    tables = tables_of(SplitProblem(layer_seconds=tuple(map(float, range(1, 13))), num_stages=2, num_chunks=6))
    bound = tables.longest()
    with pytest.raises(OutOfSteps):
        list(Tree(tables, max_steps=100).all_within(bound))
    tree = Tree(tables, max_steps=40)
    with pytest.raises(OutOfSteps):
        for _ in range(40):
            tree.any_within(bound := bound - 1)
