"""Within the slack the shortest step is found, the constraints hold, and nothing moves for nothing."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.partition import best_split
from megatron_dyn.plan.exact.refine import refine
from megatron_dyn.plan.problem import InfeasibleSplit, SplitProblem
from tests.unit.plan.brute_force import PATIENT, all_counts, is_allowed, peak, problems


class Steps:
    """Step times by a rule, and a note of what was asked."""

    def __init__(self, seconds_of: dict[tuple[int, ...], float] | None = None, *, seed: int = 0) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.largest_batch = 0
        self._seconds_of = seconds_of
        self._seed = seed

    def __call__(self, splits: Sequence[tuple[int, ...]]) -> list[float]:
        self.asked += splits
        self.largest_batch = max(self.largest_batch, len(splits))
        return [self.seconds(counts) for counts in splits]

    def seconds(self, counts: tuple[int, ...]) -> float:
        """Any of a few values, so that many splits tie, or what was given."""
        if self._seconds_of is not None:
            return self._seconds_of.get(counts, 9.0)
        return float(Random(repr((self._seed, counts))).randint(1, 6))


@settings(PATIENT, max_examples=100)
@given(problems(max_layers=7, stages=st.integers(1, 3), chunks=st.integers(1, 4)), st.integers(0, 99))
def test_it_is_the_shortest_step_within_the_slack(problem: SplitProblem, seed: int) -> None:
    """By trying all splits; of equal steps the one that moves the fewest bytes, and none for a step that is no shorter."""
    try:
        split = best_split(problem)
    except InfeasibleSplit:
        return
    steps = Steps(seed=seed)
    refined = refine(split, problem, steps, slack=0.5, budget=1000)
    every = all_counts(len(problem.layer_seconds), problem.num_runs, problem.min_layers)
    limit = peak(problem, split.counts) * 3 / 2
    allowed = [counts for counts in every if is_allowed(problem, counts) and peak(problem, counts) <= limit]
    shortest = min(map(steps.seconds, allowed))
    assert steps.seconds(refined.counts) == shortest
    assert refined.counts in allowed
    assert refined.bound_seconds == split.bound_seconds
    if shortest == steps.seconds(split.counts):
        assert replace(refined, step_proved=False) == split
    else:
        assert refined.moved_bytes == min(problem.split(c).moved_bytes for c in allowed if steps.seconds(c) == shortest)


UNEVEN = SplitProblem(layer_seconds=(1.0,) * 12, num_stages=3, current=(4, 4, 4))


def test_the_rest_of_rounding_is_no_reason_to_move() -> None:
    """One part in 10**9 is."""
    split = best_split(UNEVEN)
    for factor, expected in ((1 - 0.5e-9, (4, 4, 4)), (1 - 2e-9, (3, 5, 4))):
        refined = refine(split, UNEVEN, Steps({(4, 4, 4): 1.0, (3, 5, 4): factor}), slack=0.3, budget=1000)
        assert refined.counts == expected


def test_of_equal_steps_the_nearest_is_taken() -> None:
    """Two splits are as short; one moves two layers, the other one. Rounding between them does not count."""
    seconds = {(4, 4, 4): 2.0, (3, 4, 5): 1.0, (4, 3, 5): 1.0 + 1e-10}
    assert refine(best_split(UNEVEN), UNEVEN, Steps(seconds), slack=0.3, budget=1000).counts == (4, 3, 5)


def test_few_splits_are_all_asked_about_and_in_batches() -> None:
    """Each once: as many as there are with at most five layers on a stage."""
    problem = SplitProblem(layer_seconds=(1.0,) * 20, num_stages=5)
    steps = Steps({})
    refine(best_split(problem), problem, steps, slack=0.25, budget=121)
    within = [counts for counts in all_counts(20, 5, 1) if max(counts) <= 5]
    assert len(within) == 121
    assert sorted(steps.asked) == sorted(within)
    assert steps.largest_batch == 64


@pytest.mark.parametrize(("budget", "shortest"), [(3000, True), (20, False), (1, False), (0, False)])
def test_beyond_the_budget_it_climbs(budget: int, shortest: bool) -> None:
    """Layer by layer towards more in front; every split asked about is within the slack, and no more than allowed."""
    problem = SplitProblem(layer_seconds=(1.0,) * 80, num_stages=8, pinned_last=3, uncut=(9,), current=(10,) * 8)
    split = best_split(problem)
    asked: list[tuple[int, ...]] = []

    def seconds(splits: Sequence[tuple[int, ...]]) -> list[float]:
        asked.extend(splits)
        return [float(sum(stage * count for stage, count in enumerate(counts))) for counts in splits]

    refined = refine(split, problem, seconds, slack=0.2, budget=budget)
    assert len(asked) <= budget
    assert all(is_allowed(problem, counts) and max(counts) <= 12 for counts in asked)
    value = sum(stage * count for stage, count in enumerate(refined.counts))
    assert value <= sum(stage * count for stage, count in enumerate(split.counts))
    if shortest:
        # Six stages of 12 layers hold 72; the last must keep its three.
        assert refined.counts == (12, 12, 12, 12, 12, 12, 5, 3)


def test_pairs_of_shifts_are_tried() -> None:
    """No single shift is shorter, an exchange between two boundaries is."""
    problem = SplitProblem(layer_seconds=(1.0,) * 80, num_stages=8, current=(10,) * 8)
    steps = Steps({(10,) * 8: 2.0, (11, 9, 10, 10, 10, 9, 11, 10): 1.0})
    refined = refine(best_split(problem), problem, steps, slack=0.2, budget=500)
    assert refined.counts == (11, 9, 10, 10, 10, 9, 11, 10)


def test_it_starts_from_the_current_split_too() -> None:
    """That one is shorter than the min-max split, and nothing in between is."""
    current = (12, 8, 12, 8, 12, 8, 12, 8)
    problem = SplitProblem(layer_seconds=(1.0,) * 80, num_stages=8, current=current)
    split = best_split(problem)
    assert split.counts != current
    refined = refine(split, problem, Steps({current: 1.0}), slack=0.2, budget=300)
    assert (refined.counts, refined.moved_bytes) == (current, 0)


@pytest.mark.parametrize("arguments", [{"slack": -0.1}, {"budget": -1}])
def test_nonsense_is_refused(arguments: dict[str, float]) -> None:
    """The message holds both."""
    with pytest.raises(ValueError, match="at least 0, got"):
        refine(best_split(UNEVEN), UNEVEN, Steps(), **({"slack": 0.1, "budget": 10} | arguments))  # type: ignore[arg-type]
