"""The documented answer by trying every split, in exact fractions, and problems small enough for that.

Shared by the tests of the exact algorithm. Written without the planner's own arithmetic.
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.problem import SplitProblem

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""

SMALL_TIMES = st.integers(0, 9).map(float)
REAL_TIMES = st.floats(1e-6, 1e3)
SPEEDS = st.sampled_from([0.5, 0.75, 1.0, 1.0, 3.0])


def all_counts(num_layers: int, num_chunks: int, min_layers: int) -> Iterator[tuple[int, ...]]:
    """Every way to give `num_chunks` chunks at least `min_layers` layers each."""
    if num_chunks == 1:
        if num_layers >= min_layers:
            yield (num_layers,)
        return
    for first in range(min_layers, num_layers + 1):
        for rest in all_counts(num_layers - first, num_chunks - 1, min_layers):
            yield (first, *rest)


def stage_of(problem: SplitProblem, counts: Sequence[int]) -> list[int]:
    """The pp_rank of layer 0, 1, 2, ..."""
    return [chunk % problem.num_stages for chunk, count in enumerate(counts) for _ in range(count)]


def peak(problem: SplitProblem, counts: Sequence[int]) -> Fraction:
    """The slowest stage, without rounding."""
    busy = [Fraction(extra) for extra in problem.stage_seconds or (0.0,) * problem.num_stages]
    busy[0] += Fraction(problem.first_seconds)
    busy[(len(counts) - 1) % problem.num_stages] += Fraction(problem.last_seconds)
    for layer, stage in enumerate(stage_of(problem, counts)):
        busy[stage] += Fraction(problem.layer_seconds[layer])
    speeds = problem.speeds or (1.0,) * problem.num_stages
    return max(cost / Fraction(speed) for cost, speed in zip(busy, speeds, strict=True))


def peak_bytes(problem: SplitProblem, counts: Sequence[int]) -> int:
    """Bytes of the fullest stage that holds chunks; 0 without a cap."""
    budget = problem.memory
    if budget is None:
        return 0
    held = list(budget.rank_bytes or (0,) * problem.num_stages)
    held[0] += budget.first_bytes
    held[(len(counts) - 1) % problem.num_stages] += budget.last_bytes
    chunks = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    for layer, chunk in enumerate(chunks):
        size = budget.state_bytes[layer] + budget.activation_bytes[layer] * budget.in_flight[chunk]
        held[chunk % problem.num_stages] += size
    return max(held[: len(counts)])


def is_allowed(problem: SplitProblem, counts: Sequence[int]) -> bool:
    """Whether the split keeps together what must be, and every stage is under the memory cap."""
    chunks = [chunk for chunk, count in enumerate(counts) for _ in range(count)]
    together = all(chunks[layer] == chunks[layer - 1] for layer in problem.uncut)
    first = all(chunk == 0 for chunk in chunks[: problem.pinned_first])
    last = all(chunk == len(counts) - 1 for chunk in chunks[len(chunks) - problem.pinned_last :])
    return together and first and last and (problem.memory is None or peak_bytes(problem, counts) <= problem.memory.cap_bytes)


def moved(problem: SplitProblem, counts: Sequence[int]) -> list[int]:
    """Ids of the layers that change their stage."""
    if problem.current is None:
        return []
    stages = zip(stage_of(problem, problem.current), stage_of(problem, counts), strict=True)
    return [layer for layer, (before, after) in enumerate(stages) if before != after]


def brute_force(problem: SplitProblem) -> tuple[int, ...] | None:
    """The documented answer: fastest, then fewest bytes (moved, or on a stage), then closest boundaries, then lowest."""
    layers, chunks = len(problem.layer_seconds), problem.num_chunks or problem.num_stages
    found = [counts for counts in all_counts(layers, chunks, problem.min_layers) if is_allowed(problem, counts)]
    if not found:
        return None
    peaks = [peak(problem, counts) for counts in found]
    limit = min(peaks) * (1 + Fraction(1, 10**12))
    weights = problem.moved_bytes or (1,) * layers

    def rank(counts: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        old = problem.current or (0,) * chunks
        boundaries = zip(accumulate(counts), accumulate(old), strict=True)
        size = sum(weights[layer] for layer in moved(problem, counts))
        secondary = peak_bytes(problem, counts) if problem.current is None else size
        return secondary, [(abs(b - o), b) for b, o in boundaries]

    return min((counts for counts, time in zip(found, peaks, strict=True) if time <= limit), key=rank)


@st.composite
def problems(
    draw: st.DrawFn,
    times: st.SearchStrategy[float] = SMALL_TIMES,
    *,
    max_layers: int = 8,
    stages: st.SearchStrategy[int] | None = None,
    chunks: st.SearchStrategy[int] | None = None,
) -> SplitProblem:
    """Small problems with everything that a problem may have; about half have a cap, many of those no solution."""
    num_stages = draw(st.integers(1, 4) if stages is None else stages)
    num_chunks = num_stages if chunks is None else draw(chunks)
    num_layers = draw(st.integers(0, max_layers))
    per_layer = st.tuples(*[st.integers(0, 5)] * num_layers)
    current = None
    if draw(st.booleans()):
        cuts = sorted(draw(st.lists(st.integers(0, num_layers), min_size=num_chunks - 1, max_size=num_chunks - 1)))
        current = tuple(end - start for start, end in pairwise([0, *cuts, num_layers]))
    memory = None
    if draw(st.booleans()):
        memory = MemoryBudget(
            state_bytes=draw(per_layer),
            activation_bytes=draw(per_layer),
            in_flight=draw(st.tuples(*[st.integers(0, 4)] * num_chunks)),
            first_bytes=draw(st.integers(0, 5)),
            last_bytes=draw(st.integers(0, 5)),
            rank_bytes=draw(st.none() | st.tuples(*[st.integers(0, 5)] * num_stages)),
            cap_bytes=draw(st.integers(0, 80)),
        )
    pinned_first = draw(st.sampled_from([0, 0, 0, 1, 2]))
    pinned_last = draw(st.sampled_from([0, 0, 0, 1, 2]))
    is_pinned = pinned_first + pinned_last <= num_layers
    return SplitProblem(
        layer_seconds=tuple(draw(st.lists(times, min_size=num_layers, max_size=num_layers))),
        num_stages=num_stages,
        num_chunks=None if chunks is None else num_chunks,
        first_seconds=draw(times),
        last_seconds=draw(times),
        stage_seconds=draw(st.none() | st.tuples(*[times] * num_stages)),
        speeds=draw(st.none() | st.tuples(*[SPEEDS] * num_stages)),
        uncut=tuple(layer for layer in range(1, num_layers) if draw(st.integers(0, 5)) == 0),
        pinned_first=pinned_first if is_pinned else 0,
        pinned_last=pinned_last if is_pinned else 0,
        min_layers=draw(st.integers(0, 1)),
        current=current,
        moved_bytes=draw(st.none() | per_layer),
        memory=memory,
    )
