"""The exact algorithm against an integer programming solver, on problems that are too large to try all splits."""

from itertools import accumulate
from random import Random

import numpy as np
import pytest
from scipy.optimize import Bounds, LinearConstraint, milp

from megatron_dyn.plan import InfeasibleSplit, SplitProblem, best_split
from megatron_dyn.plan.memory import MemoryBudget


def solver_answer(problem: SplitProblem) -> float | None:
    """The least bottleneck of any split; None when there is none.

    Variables: x[layer, chunk] in {0, 1}, then the bottleneck. A layer's chunk is that of the layer before, or a later one.
    """
    num_layers, num_chunks, num_stages = len(problem.layer_seconds), problem.num_runs, problem.num_stages
    size = num_layers * num_chunks
    rows: list[np.ndarray] = []
    lows: list[float] = []
    highs: list[float] = []

    def add(values: np.ndarray, time: float, low: float, high: float) -> None:
        rows.append(np.append(values.ravel(), time))
        lows.append(low)
        highs.append(high)

    empty, budget = np.zeros((num_layers, num_chunks)), problem.memory
    for layer in range(num_layers):
        values = empty.copy()
        values[layer] = 1
        add(values, 0, 1, 1)
    for layer in range(1, num_layers):
        together = layer in problem.uncut
        for chunk in range(num_chunks):
            # Of the first chunks the layer before is in at least as many as this one.
            values = empty.copy()
            values[layer - 1, : chunk + 1] = 1
            values[layer, : chunk + 1] = -1
            add(values, 0, 0, 0 if together else np.inf)
    for chunk in range(num_chunks):
        values = empty.copy()
        values[:, chunk] = 1
        add(values, 0, problem.min_layers, np.inf)
    ends = np.array(problem.stage_seconds or (0.0,) * num_stages)
    ends[0] += problem.first_seconds
    ends[(num_chunks - 1) % num_stages] += problem.last_seconds
    for stage in range(num_stages):
        speed = 1.0 if problem.speeds is None else problem.speeds[stage]
        values = empty.copy()
        values[:, stage::num_stages] = np.array(problem.layer_seconds)[:, None]
        add(values, -speed, -np.inf, -ends[stage])
        if budget is not None:
            held = np.array(budget.state_bytes)[:, None] + np.outer(budget.activation_bytes, budget.in_flight)
            values = empty.copy()
            values[:, stage::num_stages] = held[:, stage::num_stages]
            fixed = budget.first_bytes * (stage == 0) + budget.last_bytes * (stage == (num_chunks - 1) % num_stages)
            add(values, 0, -np.inf, budget.cap_bytes - fixed)
    result = milp(
        c=np.append(np.zeros(size), 1.0),
        constraints=LinearConstraint(np.array(rows), lows, highs),
        integrality=np.append(np.ones(size), 0),
        bounds=Bounds(0, np.append(np.ones(size), np.inf)),
        options={"mip_rel_gap": 0.0},
    )
    assert result.status in (0, 2), result.message
    return float(result.x[-1]) if result.status == 0 else None


def random_problem(seed: int, *, num_layers: int, num_stages: int, num_virtual: int, with_all: bool) -> SplitProblem:
    """Layers of a few kinds with noise; `with_all` adds a cap that bites, a slow and a fast stage, and uncut layers."""
    random = Random(seed)
    num_chunks = num_stages * num_virtual
    state, activation = ([random.randint(5, 15) for _ in range(num_layers)] for _ in range(2))
    in_flight = tuple(num_chunks - chunk for chunk in range(num_chunks))
    middle = sum(in_flight) / num_chunks
    memory = MemoryBudget(
        state_bytes=tuple(state),
        activation_bytes=tuple(activation),
        in_flight=in_flight,
        first_bytes=7,
        last_bytes=9,
        cap_bytes=int(1.3 * (sum(state) + middle * sum(activation)) / num_stages),
    )
    return SplitProblem(
        layer_seconds=tuple(random.choice([1.0, 1.5, 4.0]) * random.uniform(0.9, 1.1) for _ in range(num_layers)),
        num_stages=num_stages,
        num_chunks=num_chunks,
        first_seconds=0.5,
        last_seconds=3.0,
        stage_seconds=tuple(random.uniform(0.0, 0.5) for _ in range(num_stages)),
        speeds=(0.7, *(1.0,) * (num_stages - 2), 1.3) if with_all else None,
        uncut=(3, num_layers // 2) if with_all else (),
        min_layers=int(not with_all),
        memory=memory if with_all else None,
    )


CASES = [(20, 4, 1), (40, 4, 1), (30, 8, 1), (14, 2, 2), (12, 3, 2)]


@pytest.mark.parametrize("with_all", [False, True], ids=["plain", "with-all"])
@pytest.mark.parametrize(("num_layers", "num_stages", "num_virtual"), CASES)
def test_the_solver_finds_no_better_split(num_layers: int, num_stages: int, num_virtual: int, with_all: bool) -> None:
    """Equal bottlenecks, to what the solver tolerates, and said to be proved."""
    problem = random_problem(7, num_layers=num_layers, num_stages=num_stages, num_virtual=num_virtual, with_all=with_all)
    expected = solver_answer(problem)
    if expected is None:
        with pytest.raises(InfeasibleSplit):
            best_split(problem)
        return
    split = best_split(problem)
    assert split.bottleneck_seconds == pytest.approx(expected, rel=1e-6)
    assert split.bound_seconds == split.bottleneck_seconds
    assert list(accumulate(split.counts))[-1] == num_layers
