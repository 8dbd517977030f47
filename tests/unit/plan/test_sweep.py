"""The integer search on problems too large for brute force, against textbook recurrences."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, SplitProblem, best_split
from megatron_dyn.plan.sweep import Sweep
from megatron_dyn.records import Layout

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""


def cheapest(num_layers: int, costs: Sequence[Callable[[int, int], int | None]], join: Callable[[int, int], int]) -> int:
    """Least `join` of `costs[stage](start, end)` over all splits; None marks a run that is not allowed."""
    best: list[int | None] = [0] + [None] * num_layers
    for cost in costs:
        best = [
            min(
                (
                    join(before, now)
                    for start in range(end + 1)
                    if (before := best[start]) is not None and (now := cost(start, end)) is not None
                ),
                default=None,
            )
            for end in range(num_layers + 1)
        ]
    answer = best[num_layers]
    if answer is None:
        raise InfeasibleSplit
    return answer


def textbook_answer(problem: SplitProblem) -> tuple[int, int]:
    """(slowest stage, moved bytes) by two plain recurrences over (stage, end), for whole-numbered times."""
    num_layers, last, budget = len(problem.layer_seconds), problem.num_stages - 1, problem.memory
    assert budget is not None and problem.current is not None and problem.moved_bytes is not None
    homes, weights = Layout.contiguous(problem.current).stage_of(), problem.moved_bytes

    def time(stage: int, start: int, end: int) -> int | None:
        used = budget.fixed_bytes(stage) + sum(budget.layer_bytes(stage, layer) for layer in range(start, end))
        if end - start < problem.min_layers or used > budget.cap_bytes:
            return None
        ends = problem.first_seconds * (stage == 0) + problem.last_seconds * (stage == last)
        return int(sum(problem.layer_seconds[start:end]) + ends)

    def arriving(stage: int, start: int, end: int) -> int | None:
        spent = time(stage, start, end)
        if spent is None or spent > peak_time:
            return None
        return sum(weights[layer] for layer in range(start, end) if homes[layer] != stage)

    peak_time = cheapest(num_layers, [partial(time, stage) for stage in range(problem.num_stages)], max)
    stages = [partial(arriving, stage) for stage in range(problem.num_stages)]
    return peak_time, cheapest(num_layers, stages, int.__add__)


def random_problem(random: Random, *, num_layers: int, num_stages: int, min_layers: int, capped: bool) -> SplitProblem:
    """A problem beyond brute force, with whole-numbered times and, if `capped`, a cap that often bites."""
    cuts = sorted(random.randint(0, num_layers) for _ in range(num_stages - 1))
    tight = 3 * num_stages + 4 + 14 * (num_layers // num_stages + 2)
    return SplitProblem(
        layer_seconds=tuple(random.choice([0.0, 1.0, 3.0, 7.0, 40.0]) for _ in range(num_layers)),
        num_stages=num_stages,
        first_seconds=2.0,
        last_seconds=11.0,
        min_layers=min_layers,
        current=tuple(end - start for start, end in pairwise([0, *cuts, num_layers])),
        moved_bytes=tuple(random.randint(0, 9) for _ in range(num_layers)),
        memory=MemoryBudget(
            state_bytes=tuple(random.randint(1, 9) for _ in range(num_layers)),
            activation_bytes=tuple(random.randint(0, 3) for _ in range(num_layers)),
            in_flight=tuple(range(num_stages, 0, -1)),
            first_bytes=4,
            cap_bytes=tight if capped else 10**6,
        ),
    )


@settings(PATIENT, max_examples=40)
@given(st.randoms(use_true_random=False), st.integers(20, 48), st.integers(2, 12), st.integers(0, 1), st.booleans())
def test_larger_problems_agree_with_a_plain_dynamic_program(
    random: Random, num_layers: int, num_stages: int, min_layers: int, capped: bool
) -> None:
    """Too many splits to try all: the optimum and the fewest moved bytes by textbook recurrences."""
    problem = random_problem(random, num_layers=num_layers, num_stages=num_stages, min_layers=min_layers, capped=capped)
    try:
        expected = textbook_answer(problem)
    except InfeasibleSplit:
        with pytest.raises(InfeasibleSplit, match="expected at most [0-9]+ bytes"):
            best_split(problem)
        return
    split = best_split(problem)
    assert (split.bottleneck_seconds, split.moved_bytes) == expected


def test_the_search_bound_never_skips_a_candidate() -> None:
    """`next_time` is the next larger time of any run of layers on any stage, by brute force."""
    layers, offsets = [3, 0, 5, 2, 2], (4, 0, 1)
    sweep = Sweep(prefix=np.array([0, *accumulate(layers)]), offsets=offsets, min_layers=0, memory_ends=None)
    runs = {sum(layers[a:b]) + offset for offset in offsets for a in range(6) for b in range(a, 6)}
    for bound in range(5, 16):
        assert sweep.next_time(bound) == min(time for time in runs if time > bound)
