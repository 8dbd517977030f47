"""The integer search on problems too large for brute force, against textbook recurrences."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, combinations_with_replacement, pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, SplitProblem, best_split
from megatron_dyn.plan.exact.sweep import ByteTable, Sweep
from megatron_dyn.plan.exact.tables import Rate
from megatron_dyn.records import Layout
from tests.unit.plan.brute_force import PATIENT


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


def sweeps(random: Random) -> Sweep:
    """Six items on three stages of different speed, with ends and a table of bytes."""
    loads = [random.randint(0, 9) for _ in range(6)]
    sizes = [[random.randint(0, 9) for _ in range(6)] for _ in range(3)]
    return Sweep(
        prefix=[0, *accumulate(loads)],
        fixed=tuple(random.randint(0, 9) for _ in range(3)),
        rates=tuple(Rate(random.choice([1, 2]), random.choice([1, 3])) for _ in range(3)),
        least=tuple(random.randint(0, 1) for _ in range(3)),
        memory=ByteTable(
            needed=np.array([[0, *accumulate(row)] for row in sizes]), fixed=(2, 0, 3), cap_bytes=random.randint(3, 40)
        ),
    )


def within(sweep: Sweep, bound: int, cap_bytes: int) -> list[tuple[int, ...]]:
    """Every split within both, by trying all."""
    found = []
    for first, second in combinations_with_replacement(range(7), 2):
        ends = (0, first, second, 6)
        runs = list(enumerate(pairwise(ends)))
        times = [sweep.rates[s].time(sweep.fixed[s] + sweep.prefix[b] - sweep.prefix[a]) for s, (a, b) in runs]
        assert sweep.memory is not None
        sizes = [sweep.memory.fixed[s] + sweep.memory.needed[s, b] - sweep.memory.needed[s, a] for s, (a, b) in runs]
        if max(times) <= bound and max(sizes) <= cap_bytes and all(b - a >= sweep.least[s] for s, (a, b) in runs):
            found.append(tuple(b - a for _, (a, b) in runs))
    return found


@settings(PATIENT, max_examples=80)
@given(st.randoms(use_true_random=False), st.integers(0, 60), st.integers(0, 30))
def test_bounds_are_met_where_they_can_be(random: Random, bound: int, floor: int) -> None:
    """`split_within`, `fastest` and `leanest` against all 28 splits."""
    sweep = sweeps(random)
    assert sweep.memory is not None
    cap_bytes = sweep.memory.cap_bytes
    found, allowed = sweep.split_within(bound), within(sweep, bound, cap_bytes)
    assert (found in allowed) if allowed else (found is None)
    best = sweep.fastest(floor, 1000)
    if best is None:
        assert within(sweep, 1000, cap_bytes) == []
        return
    assert best[1] in within(sweep, best[0], cap_bytes)
    assert best[0] == floor or within(sweep, best[0] - 1, cap_bytes) == []
    leanest = sweep.leanest(best[0])
    assert within(sweep, best[0], leanest) and not within(sweep, best[0], leanest - 1)


def test_neighbouring_bounds_are_told_apart() -> None:
    """Unit items on two stages: every whole time and size is a candidate, so a search that skips one is off by one."""
    for num_items in range(1, 40):
        needed = np.array([np.arange(num_items + 1)] * 2)
        sweep = Sweep(
            prefix=range(num_items + 1),
            fixed=(0, 0),
            rates=(Rate(1, 1), Rate(3, 1)),
            least=(0, 0),
            memory=ByteTable(needed=needed, fixed=(0, 0), cap_bytes=num_items),
        )
        times = [max(first, 3 * (num_items - first)) for first in range(num_items + 1)]
        found = sweep.fastest(1, 3 * num_items)
        assert found is not None and found[0] == min(times)
        assert sweep.leanest(3 * num_items) == -(-num_items // 2)
