"""Virtual stages: the best split by brute force where splits are few, and by a solver and a proved bound beyond."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, SplitProblem, best_split
from tests.unit.plan.brute_force import PATIENT, REAL_TIMES, brute_force, peak, peak_bytes, problems

VIRTUAL = {"stages": st.integers(1, 3), "chunks": st.integers(2, 6)}


@settings(PATIENT, max_examples=120)
@given(problems(max_layers=10, **VIRTUAL))
def test_it_is_the_documented_split(problem: SplitProblem) -> None:
    """Equal to brute force in every count, ties included; infeasible exactly when brute force says so."""
    expected = brute_force(problem)
    if expected is None:
        with pytest.raises(InfeasibleSplit, match="^expected at (least|most) [0-9]+ .*, got "):
            best_split(problem)
        return
    split = best_split(problem)
    assert split.counts == expected
    assert split.bottleneck_seconds == split.bound_seconds == pytest.approx(float(peak(problem, expected)), rel=1e-15)


@settings(PATIENT, max_examples=40)
@given(problems(REAL_TIMES, max_layers=9, **VIRTUAL))
def test_real_times_are_as_exact(problem: SplitProblem) -> None:
    """Times that are no round numbers."""
    expected = brute_force(problem)
    if expected is not None:
        assert best_split(problem).bottleneck_seconds <= float(peak(problem, expected)) * (1 + 2e-12)


def large(*, noise: float, current: tuple[int, ...] | None = None, memory: MemoryBudget | None = None) -> SplitProblem:
    """128 layers over four chunks on each of 16 stages."""
    random = Random(1)
    return SplitProblem(
        layer_seconds=tuple(1.0 + noise * random.random() for _ in range(128)),
        num_stages=16,
        num_chunks=64,
        current=current,
        memory=memory,
    )


@pytest.mark.parametrize(("noise", "most"), [(0.0, 1e-12), (0.02, 0.005), (0.5, 0.02)])
def test_beyond_the_tree_it_is_near_a_proved_bound(noise: float, most: float) -> None:
    """Equal layers are proved best; noisy ones are off by less than they differ among each other."""
    split = best_split(large(noise=noise))
    assert split.bound_seconds <= split.bottleneck_seconds <= split.bound_seconds * (1 + most)
    assert split.bound_seconds >= sum(large(noise=noise).layer_seconds) / 16 * (1 - 1e-12)
    assert (sum(split.counts), min(split.counts) >= 1) == (128, True)


def test_beyond_the_tree_the_best_current_split_stays() -> None:
    """Chunks of one and three layers, so that every stage has eight: nothing moves, though chunks of two are as good."""
    current = (1,) * 16 + (3,) * 16 + (1,) * 16 + (3,) * 16
    split = best_split(large(noise=0.0, current=current))
    assert (split.counts, split.moved_layers) == (current, ())


@pytest.mark.parametrize(("cap_bytes", "fits"), [(8 * 34, True), (159, False)])
def test_beyond_the_tree_the_cap_holds(cap_bytes: int, fits: bool) -> None:
    """In front a layer is held for 64 micro-batches, behind for one; stage 0 holds 64 + 48 + 32 + 16 whatever it does."""
    memory = MemoryBudget(
        state_bytes=(0,) * 128, activation_bytes=(1,) * 128, in_flight=tuple(range(64, 0, -1)), cap_bytes=cap_bytes
    )
    problem = large(noise=0.02, memory=memory)
    if fits:
        split = best_split(problem)
        assert peak_bytes(problem, split.counts) <= cap_bytes
        assert split.bottleneck_seconds <= split.bound_seconds * 1.01
        return
    with pytest.raises(InfeasibleSplit, match="expected at most 159 bytes .* got no split of 128 layers over 64 chunks on 16"):
        best_split(problem)
