"""What DeepSpeed's PipelineModule would do: its balancing functions of yesterday and today, written anew from what they do.

The behaviour is that of `partition_balanced` in deepspeed/runtime/utils.py before (up to 0.12.4) and since pull request 4312,
flaws included: `benchmarks.planner` runs the real ones beside these and compares. They see one list of numbers: no ends,
speeds, memory or empty stages. It must not know layouts or schedules.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

import numpy as np

from megatron_dyn.plan.problem import Split, SplitProblem
from megatron_dyn.plan.rivals.answers import NotApplicable, check_no_virtual, check_places, simple_bound_seconds

_OLD_EPSILON = 1e-3
"""Absolute, whatever the unit of the weights: below it the old search does not look."""
_MILLISECONDS = 1e3
"""Per second. The old function's callers gave it milliseconds; given seconds its epsilon would be coarser than a layer."""


def balanced_old(weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Items per part by the old method: a binary search on the heaviest part, down to 1e-3 absolute.

    Parts are filled from the front, each strictly below the bottleneck, so the last can come out empty; and an item that
    reaches the bottleneck at the very front empties the first part and lets the second have everything.
    """
    if len(weights) <= num_parts:
        return _one_each(len(weights), num_parts)
    sums = list(accumulate(weights))
    low, high = sums[-1] / num_parts, sums[-1]
    while high > low + _OLD_EPSILON:
        middle = low + (high - low) / 2
        if _fill(sums, num_parts, middle)[1]:
            high = middle
        else:
            low = middle + _OLD_EPSILON
    boundaries, fits = _fill(sums, num_parts, high)
    if not fits:
        raise NotApplicable(f"deepspeed-balanced-old: its own search ends in an assertion for {num_parts} parts")
    return _counts(boundaries)


def balanced(weights: Sequence[float], num_parts: int) -> tuple[int, ...]:
    """Items per part by the present method: a dynamic program on the difference between heaviest and lightest part.

    It keeps one partial answer per (items, parts), the one with the least difference so far, the longest prefix among
    equals. A better whole may start with a worse part, so the difference found is not always the least, and the heaviest
    part is no aim at all. Time: items squared times parts.
    """
    num_items = len(weights)
    if num_items <= num_parts:
        return _one_each(num_items, num_parts)
    sums = np.concatenate(([0.0], np.cumsum(np.asarray(weights, dtype=np.float64))))
    heaviest, lightest = sums.copy(), sums.copy()
    choices = [np.zeros(num_items + 1, dtype=np.int64)]
    for parts in range(2, num_parts + 1):
        heavier, lighter = np.full(num_items + 1, np.inf), np.full(num_items + 1, np.inf)
        choice = np.zeros(num_items + 1, dtype=np.int64)
        for end in range(parts, num_items + 1):
            starts = slice(parts - 1, end)
            last_part = sums[end] - sums[starts]
            high, low = np.maximum(heaviest[starts], last_part), np.minimum(lightest[starts], last_part)
            difference = high - low
            # The last of the least ones: argmin gives the first, so it looks from behind.
            best = len(difference) - 1 - int(difference[::-1].argmin())
            heavier[end], lighter[end], choice[end] = high[best], low[best], parts - 1 + best
        heaviest, lightest = heavier, lighter
        choices.append(choice)
    boundaries = [num_items]
    for choice in reversed(choices):
        boundaries.append(int(choice[boundaries[-1]]))
    return _counts(boundaries[::-1])


def deepspeed_parameters(problem: SplitProblem) -> Split:
    """`partition_method="parameters"`; raises NotApplicable without parameters, for virtual stages, or where pins break."""
    if problem.layer_parameters is None:
        raise NotApplicable("deepspeed-parameters: expected the parameters of each layer, got none")
    return _answer(problem, balanced, problem.layer_parameters, "deepspeed-parameters")


def deepspeed_balanced(problem: SplitProblem) -> Split:
    """Today's function given the measured times; raises NotApplicable for virtual stages, or where pins break."""
    return _answer(problem, balanced, problem.layer_seconds, "deepspeed-balanced")


def deepspeed_balanced_old(problem: SplitProblem) -> Split:
    """The old function given the measured times in milliseconds; raises NotApplicable like `deepspeed_balanced`."""
    milliseconds = [_MILLISECONDS * seconds for seconds in problem.layer_seconds]
    return _answer(problem, balanced_old, milliseconds, "deepspeed-balanced-old")


def _answer(
    problem: SplitProblem, method: Callable[[Sequence[float], int], tuple[int, ...]], weights: Sequence[float], name: str
) -> Split:
    # Before the method runs: its time is quadratic in the layers, and its answer would be thrown away.
    check_no_virtual(problem, name)
    counts = method(weights, problem.num_stages)
    check_places(problem, counts, name)
    return problem.split(counts, bound_seconds=simple_bound_seconds(problem))


def _fill(sums: Sequence[float], num_parts: int, bottleneck: float) -> tuple[list[int], bool]:
    """Boundaries of parts filled from the front, and whether the method calls that a success."""
    boundaries, target = [0], bottleneck
    for _ in range(1, num_parts):
        end = bisect_left(sums, target)
        boundaries.append(end)
        if end == len(sums):
            # The first item of the part that took all the rest is left out of this test.
            fits = sums[-1] - sums[boundaries[-2]] < bottleneck
            return boundaries + [end] * (num_parts + 1 - len(boundaries)), fits
        # After an empty first part this reads the last sum: the target jumps past the end. Kept, as it decides results.
        target = sums[end - 1] + bottleneck
    return [*boundaries, len(sums)], target >= sums[-1]


def _one_each(num_items: int, num_parts: int) -> tuple[int, ...]:
    return tuple(1 if part < num_items else 0 for part in range(num_parts))


def _counts(boundaries: Sequence[int]) -> tuple[int, ...]:
    return tuple(end - start for start, end in pairwise(boundaries))
