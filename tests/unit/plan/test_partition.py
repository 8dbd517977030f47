"""The split is the best there is, by brute force over all splits, and its ties are broken as documented."""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, Split, SplitProblem, best_split

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""

SMALL_TIMES = st.integers(0, 9).map(float)
REAL_TIMES = st.floats(1e-6, 1e3)


def all_counts(num_layers: int, num_stages: int, min_layers: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `num_stages` stages at least `min_layers` layers each."""
    if num_stages == 1:
        if num_layers >= min_layers:
            yield (num_layers,)
        return
    for first in range(min_layers, num_layers + 1):
        for rest in all_counts(num_layers - first, num_stages - 1, min_layers):
            yield (first, *rest)


def stage_of(counts: Sequence[int]) -> list[int]:
    """The stage of layer 0, 1, 2, ..."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def peak(problem: SplitProblem, counts: Sequence[int]) -> Fraction:
    """The slowest stage, without rounding."""
    busy = [
        sum(map(Fraction, problem.layer_seconds[start:end]), Fraction(0))
        for start, end in pairwise(accumulate(counts, initial=0))
    ]
    busy[0] += Fraction(problem.first_seconds)
    busy[-1] += Fraction(problem.last_seconds)
    return max(busy)


def fits(problem: SplitProblem, counts: Sequence[int]) -> bool:
    """Whether every stage is under the memory cap; written without the budget's own arithmetic."""
    budget = problem.memory
    if budget is None:
        return True
    bytes_of = [0] * problem.num_stages
    bytes_of[0] += budget.first_bytes
    bytes_of[-1] += budget.last_bytes
    for layer, stage in enumerate(stage_of(counts)):
        bytes_of[stage] += budget.state_bytes[layer] + budget.activation_bytes[layer] * budget.in_flight[stage]
    return max(bytes_of) <= budget.cap_bytes


def moved(problem: SplitProblem, counts: Sequence[int]) -> list[int]:
    """Ids of the layers that change their stage."""
    if problem.current is None:
        return []
    stages = zip(stage_of(problem.current), stage_of(counts), strict=True)
    return [layer for layer, (before, after) in enumerate(stages) if before != after]


def brute_force(problem: SplitProblem) -> tuple[int, ...] | None:
    """The documented answer by trying everything: fastest, then fewest bytes, then closest boundaries, then lowest."""
    layers = len(problem.layer_seconds)
    found = [c for c in all_counts(layers, problem.num_stages, problem.min_layers) if fits(problem, c)]
    if not found:
        return None
    limit = min(peak(problem, counts) for counts in found) * (1 + Fraction(1, 10**12))
    weights = problem.moved_bytes or (1,) * layers

    def rank(counts: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        old = problem.current or (0,) * problem.num_stages
        boundaries = zip(accumulate(counts), accumulate(old), strict=True)
        return sum(weights[layer] for layer in moved(problem, counts)), [(abs(b - o), b) for b, o in boundaries]

    return min((counts for counts in found if peak(problem, counts) <= limit), key=rank)


@st.composite
def problems(draw: st.DrawFn, times: st.SearchStrategy[float] = SMALL_TIMES) -> SplitProblem:
    """Problems small enough for brute force; about half have a cap, many of those no solution."""
    num_stages = draw(st.integers(1, 4))
    num_layers = draw(st.integers(0, 8))
    per_layer = st.tuples(*[st.integers(0, 5)] * num_layers)
    min_layers = draw(st.integers(0, 1))
    current = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1)))
        current = tuple(end - start for start, end in pairwise([0, *cuts, num_layers]))
    memory = None
    if draw(st.booleans()):
        memory = MemoryBudget(
            state_bytes=draw(per_layer),
            activation_bytes=draw(per_layer),
            in_flight=draw(st.tuples(*[st.integers(0, 4)] * num_stages)),
            first_bytes=draw(st.integers(0, 5)),
            last_bytes=draw(st.integers(0, 5)),
            cap_bytes=draw(st.integers(0, 80)),
        )
    return SplitProblem(
        layer_seconds=tuple(draw(st.lists(times, min_size=num_layers, max_size=num_layers))),
        num_stages=num_stages,
        first_seconds=draw(times),
        last_seconds=draw(times),
        min_layers=min_layers,
        current=current,
        moved_bytes=draw(st.none() | per_layer),
        memory=memory,
    )


HOLE = SplitProblem(
    # Layer 1 fits on stage 2 only, so stages 0 and 1 must leave a boundary right before it.
    layer_seconds=(1.0, 1.0, 1.0),
    num_stages=3,
    min_layers=0,
    memory=MemoryBudget(state_bytes=(1, 1, 1), activation_bytes=(1, 5, 1), in_flight=(3, 2, 1), first_bytes=3, cap_bytes=8),
)


FORCED_EMPTY = SplitProblem(
    # Stage 1 fits neither of the layers of which it must hold one.
    layer_seconds=(1.0,) * 4,
    num_stages=3,
    memory=MemoryBudget(state_bytes=(1,) * 4, activation_bytes=(0, 1, 1, 0), in_flight=(0, 9, 0), cap_bytes=8),
)


@settings(PATIENT, max_examples=400)
@given(problems())
@example(HOLE)
@example(FORCED_EMPTY)
def test_it_is_the_documented_split(problem: SplitProblem) -> None:
    """Equal to brute force in every count, cap and tie-break included; infeasible exactly when brute force says so."""
    expected = brute_force(problem)
    if expected is None:
        with pytest.raises(InfeasibleSplit, match="^expected at (least|most) [0-9]+ .*, got [0-9]+"):
            best_split(problem)
        return
    split = best_split(problem)
    assert split.counts == expected
    assert split.moved_layers == tuple(moved(problem, expected))
    weights = problem.moved_bytes or (1,) * len(problem.layer_seconds)
    assert split.moved_bytes == sum(weights[layer] for layer in split.moved_layers)
    assert split.bottleneck_seconds == pytest.approx(float(peak(problem, expected)), rel=1e-15)


@settings(PATIENT, max_examples=150)
@given(problems(REAL_TIMES))
def test_real_times_are_as_exact(problem: SplitProblem) -> None:
    """Times that are no round numbers: the optimum is met to 1e-12, every layer is placed once, in order."""
    expected = brute_force(problem)
    if expected is None:
        return
    split = best_split(problem)
    assert len(split.counts) == problem.num_stages
    assert sum(split.counts) == len(problem.layer_seconds)
    assert min(split.counts) >= problem.min_layers
    assert fits(problem, split.counts)
    assert split.bottleneck_seconds <= float(peak(problem, expected)) * (1 + 2e-12)


@settings(PATIENT, max_examples=100)
@given(problems(REAL_TIMES), st.integers(-60, 60), st.sampled_from([1.0, 3.0, 0.1]))
def test_scaling_all_times_scales_the_answer(problem: SplitProblem, exponent: int, factor: float) -> None:
    """Another unit of time gives the same optimum; by powers of two, the very same split."""
    scale = 2.0**exponent * factor
    scaled = SplitProblem(
        layer_seconds=tuple(seconds * scale for seconds in problem.layer_seconds),
        num_stages=problem.num_stages,
        first_seconds=problem.first_seconds * scale,
        last_seconds=problem.last_seconds * scale,
        min_layers=problem.min_layers,
        current=problem.current,
        moved_bytes=problem.moved_bytes,
        memory=problem.memory,
    )
    if brute_force(problem) is None:
        return
    first, second = best_split(problem), best_split(scaled)
    assert second.bottleneck_seconds == pytest.approx(first.bottleneck_seconds * scale, rel=1e-11)
    if factor == 1.0:
        assert second.counts == first.counts


def uniform(num_layers: int, num_stages: int, current: Sequence[int] | None = None) -> Split:
    """The split of equal layers."""
    return best_split(
        SplitProblem(
            layer_seconds=(1.0,) * num_layers,
            num_stages=num_stages,
            current=None if current is None else tuple(current),
        )
    )


@pytest.mark.parametrize(("num_layers", "num_stages", "best"), [(5, 4, 2), (42, 16, 3), (38, 8, 5)])
def test_no_stage_is_empty_and_the_remainder_is_spread(num_layers: int, num_stages: int, best: int) -> None:
    """Small inputs that public partitioners got wrong (users.md C5)."""
    split = uniform(num_layers, num_stages)
    assert (split.bottleneck_seconds, sum(split.counts), min(split.counts) >= 1) == (best, num_layers, True)


@pytest.mark.parametrize(
    ("current", "expected"),
    [((2, 1, 1, 1), (2, 1, 1, 1)), ((1, 1, 2, 1), (1, 1, 2, 1)), ((1, 1, 1, 2), (1, 1, 1, 2)), (None, (1, 1, 1, 2))],
)
def test_an_optimal_current_split_stays(current: tuple[int, ...] | None, expected: tuple[int, ...]) -> None:
    """Of the four best splits of five layers, the one that moves nothing (users.md C5)."""
    split = uniform(5, 4, current)
    assert (split.counts, split.moved_layers) == (expected, ())


def test_a_heavy_tail_takes_layers_from_the_last_stage() -> None:
    """The GLM-5.2 report (users.md C1): 29.7 before, at most one layer more than the even share after."""
    problem = SplitProblem(layer_seconds=(1.067,) * 78, num_stages=4, last_seconds=16.9, current=(18, 24, 24, 12), min_layers=1)
    split = best_split(problem)
    assert float(peak(problem, (18, 24, 24, 12))) == pytest.approx(29.7, abs=0.05)
    assert split.bottleneck_seconds == pytest.approx(float(peak(problem, (24, 23, 23, 8))), rel=1e-12)
    assert split.bottleneck_seconds == pytest.approx(25.5, abs=0.15)
    assert sum(split.counts) == 78
    assert len(split.moved_layers) == 12


@pytest.mark.parametrize(
    ("layer_seconds", "num_stages", "best"),
    [
        ([1.0] * 8 + [3.0] * 16, 4, 15.0),
        ([1.0] * 8 + [3.0] * 16, 3, 20.0),
        ([3.0] * 24, 4, 18.0),
        ([1.0] * 8 + [0.8] * 8 + [0.6] * 8 + [0.4] * 8, 4, 6.0),
        ([1.0] * 8 + [0.8] * 8 + [0.6] * 8 + [0.4] * 8, 3, 8.0),
        ([1.0, 0.125] * 16, 4, 4.5),
    ],
)
def test_dynamic_models_have_their_known_optimum(layer_seconds: list[float], num_stages: int, best: float) -> None:
    """Freezing, early exit and mixture of depths (users.md C7, C16)."""
    split = best_split(SplitProblem(layer_seconds=tuple(layer_seconds), num_stages=num_stages))
    assert split.bottleneck_seconds == pytest.approx(best, rel=1e-12)


def test_equal_layers_tie_in_spite_of_rounding() -> None:
    """Sums of 0.1 differ in their last bits by where they start; that must not cost a move."""
    current = (5,) * 63 + (4, 5)
    problem = SplitProblem(layer_seconds=(0.1,) * 324, num_stages=65, current=current)
    assert best_split(problem).counts == current


def test_sums_that_differ_by_rounding_tie() -> None:
    """0.1 + 0.2 is a little more than 0.3: the current split may be slower by that, and stays."""
    for current in ((1, 2), (2, 1)):
        problem = SplitProblem(layer_seconds=(0.3, 1.0, 0.1 + 0.2), num_stages=2, current=current)
        assert best_split(problem).counts == current


def test_zero_times_split_anywhere() -> None:
    """Nothing costs anything: the current split is as good as any, and nothing divides by zero."""
    problem = SplitProblem(layer_seconds=(0.0,) * 4, num_stages=2, current=(1, 3))
    assert best_split(problem) == Split(counts=(1, 3), bottleneck_seconds=0.0, moved_layers=(), moved_bytes=0)


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (
            SplitProblem(layer_seconds=(1.0,) * 3, num_stages=4),
            "expected at least 4 layers, one for each of 4 stages, got 3",
        ),
        (
            SplitProblem(
                layer_seconds=(1.0,) * 2,
                num_stages=2,
                memory=MemoryBudget(state_bytes=(1, 1), activation_bytes=(0, 0), in_flight=(2, 1), last_bytes=9, cap_bytes=8),
            ),
            "expected at most 8 bytes on each stage, got 9 on stage 1 before it holds any layer",
        ),
        (
            SplitProblem(
                layer_seconds=(1.0,) * 3,
                num_stages=3,
                memory=MemoryBudget(state_bytes=(1, 7, 1), activation_bytes=(1, 2, 1), in_flight=(3, 2, 1), cap_bytes=8),
            ),
            "expected at most 8 bytes on each stage, got 9 on stage 2 for layer 1, where it needs the fewest",
        ),
        (
            SplitProblem(
                layer_seconds=(1.0,) * 6,
                num_stages=2,
                memory=MemoryBudget(state_bytes=(2,) * 6, activation_bytes=(1,) * 6, in_flight=(2, 1), cap_bytes=8),
            ),
            "expected at most 8 bytes on each stage, got 12 on stage 1 for layers 2..5, with the stages filled in order",
        ),
        (
            SplitProblem(
                layer_seconds=(1.0,) * 2,
                num_stages=2,
                memory=MemoryBudget(state_bytes=(2, 2), activation_bytes=(4, 4), in_flight=(2, 1), cap_bytes=8),
            ),
            "expected at most 8 bytes on each stage, got 10 on stage 0 for layer 0, with the stages filled in order",
        ),
    ],
)
def test_an_impossible_split_says_why(problem: SplitProblem, message: str) -> None:
    """One line with the stage or layer, expected and actual."""
    with pytest.raises(InfeasibleSplit) as caught:
        best_split(problem)
    assert str(caught.value) == message


BUDGET = MemoryBudget(state_bytes=(1,), activation_bytes=(1,), in_flight=(1,), cap_bytes=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "got 0 stages"),
        ({"min_layers": 2}, "min_layers 2"),
        ({"layer_seconds": (1.0, -1.0)}, "layer 1: expected a time of at least 0, got -1.0"),
        ({"layer_seconds": (float("nan"), 1.0)}, "layer 0: .* got nan"),
        ({"first_seconds": float("inf")}, "first_seconds: .* got inf"),
        ({"last_seconds": -2.0}, "last_seconds: .* got -2.0"),
        ({"current": (2,)}, r"current \[2\] does not place 2 layers on 2 stages"),
        ({"current": (2, 1)}, r"current \[2, 1\] does not place 2 layers"),
        ({"current": (3, -1)}, r"current \[3, -1\] does not place"),
        ({"moved_bytes": (1,)}, "moved_bytes: expected 2 sizes .* got 1"),
        ({"moved_bytes": (1, -1)}, "with minimum -1"),
        ({"moved_bytes": (2**61, 1)}, "below 2..61"),
        ({"memory": BUDGET}, "memory: expected 2 layers and 2 stages, got 1 and 1"),
    ],
)
def test_a_malformed_problem_is_refused(arguments: dict[str, object], message: str) -> None:
    """The message names the field, what was expected and what was found."""
    with pytest.raises(ValueError, match=message):
        SplitProblem(**({"layer_seconds": (1.0, 1.0), "num_stages": 2} | arguments))  # type: ignore[arg-type]


SCRIPT = """
import sys
from megatron_dyn.plan import SplitProblem, best_split
seconds = tuple(0.1 + 0.01 * ((7 * layer) % 13) for layer in range(200))
print(best_split(SplitProblem(layer_seconds=seconds, num_stages=12, last_seconds=0.7, current=(17,) * 11 + (13,))))
assert not {"torch", "megatron"} & set(sys.modules), "the planner imported torch or Megatron"
"""


def test_every_process_computes_the_same() -> None:
    """Another hash seed, the same answer; and the planner needs neither torch nor Megatron."""
    answers = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(answers) == 1
