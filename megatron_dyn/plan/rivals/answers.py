"""What the algorithms beside `best_split` share: how one says that it is not for a problem, and a bound for all.

What an answer takes and moves is told by `SplitProblem.split`, as for `best_split`. It must not know how counts are found.
"""

import math
from collections.abc import Sequence
from itertools import accumulate

from megatron_dyn.plan.problem import InfeasibleSplit, SplitProblem


class NotApplicable(InfeasibleSplit):
    """The algorithm cannot answer this problem, though another might. The message names what it cannot do."""


def check_no_virtual(problem: SplitProblem, name: str) -> None:
    """Raise NotApplicable where a stage has several chunks; `name` is the algorithm's."""
    if problem.num_runs != problem.num_stages:
        raise NotApplicable(
            f"{name} gives each stage one run of layers: expected {problem.num_stages} chunks for "
            f"{problem.num_stages} stages, got {problem.num_runs}"
        )


def check_places(problem: SplitProblem, counts: Sequence[int], name: str) -> None:
    """Raise NotApplicable where `counts` cut what must not be cut or unpin a layer: no model could run at that split.

    For algorithms that do not look at these constraints. Empty stages and the memory cap are left alone.
    """
    boundaries = list(accumulate(counts, initial=0))
    cut = sorted(set(problem.uncut) & set(boundaries[1:-1]))
    if cut:
        raise NotApplicable(
            f"{name} knows no layers that belong together: expected layers {cut[0] - 1} and {cut[0]} on one chunk"
        )
    if counts[0] < problem.pinned_first or counts[-1] < problem.pinned_last:
        raise NotApplicable(
            f"{name} knows no pinned layers: expected at least {problem.pinned_first} on the first and "
            f"{problem.pinned_last} on the last chunk, got {counts[0]} and {counts[-1]}"
        )


def simple_bound_seconds(problem: SplitProblem) -> float:
    """No split is faster: the total shared out in proportion to speeds, the largest layer on the fastest stage, each end.

    For algorithms that prove nothing better of their answers.
    """
    speeds = problem.speeds or (1.0,) * problem.num_stages
    fixed = (problem.first_seconds, problem.last_seconds, *(problem.stage_seconds or ()))
    total = math.fsum((*problem.layer_seconds, *fixed))
    largest = max(problem.layer_seconds, default=0.0)
    return max(total / math.fsum(speeds), largest / max(speeds), problem.bottleneck_seconds((0,) * problem.num_runs))
