"""The split is the best there is, by brute force over all splits, and its ties are broken as documented."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, Split, SplitProblem, best_split
from tests.unit.plan.brute_force import PATIENT, REAL_TIMES, brute_force, is_allowed, moved, peak, problems

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


def check_documented(problem: SplitProblem) -> None:
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
    assert split.bound_seconds == split.bottleneck_seconds


@settings(PATIENT, max_examples=150)
@given(problems())
@example(HOLE)
@example(FORCED_EMPTY)
def test_it_is_the_documented_split(problem: SplitProblem) -> None:
    """Speeds, pins, uncut layers, caps, empty stages."""
    check_documented(problem)


@settings(PATIENT, max_examples=30)
@given(problems(max_layers=12, stages=st.just(5)))
def test_larger_problems_have_the_documented_split(problem: SplitProblem) -> None:
    """Up to 12 layers on 5 stages."""
    check_documented(problem)


@settings(PATIENT, max_examples=60)
@given(problems(stages=st.integers(2, 5), chunks=st.integers(1, 2)))
def test_stages_without_a_chunk_only_bound_the_time(problem: SplitProblem) -> None:
    """Fewer chunks than stages: the others are as slow as what they hold, and hold no layer."""
    check_documented(problem)


@settings(PATIENT, max_examples=100)
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
    assert is_allowed(problem, split.counts)
    assert split.bottleneck_seconds <= float(peak(problem, expected)) * (1 + 2e-12)


@settings(PATIENT, max_examples=60)
@given(problems(REAL_TIMES), st.integers(-60, 60), st.sampled_from([1.0, 3.0, 0.1]))
def test_scaling_all_times_scales_the_answer(problem: SplitProblem, exponent: int, factor: float) -> None:
    """Another unit of time gives the same optimum; by powers of two, the very same split."""
    scale = 2.0**exponent * factor
    scaled = replace(
        problem,
        layer_seconds=tuple(seconds * scale for seconds in problem.layer_seconds),
        first_seconds=problem.first_seconds * scale,
        last_seconds=problem.last_seconds * scale,
        stage_seconds=problem.stage_seconds and tuple(seconds * scale for seconds in problem.stage_seconds),
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


SCRIPT = """
import sys
from megatron_dyn.plan import SplitProblem, best_split
seconds = tuple(0.1 + 0.01 * ((7 * layer) % 13) for layer in range(200))
print(best_split(SplitProblem(layer_seconds=seconds, num_stages=12, last_seconds=0.7, current=(17,) * 11 + (13,))))
print(best_split(SplitProblem(layer_seconds=seconds[:80], num_stages=8, num_chunks=32, last_seconds=0.7)))
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
