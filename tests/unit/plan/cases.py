"""Random problems for the algorithms beside `best_split`, and what their answers are checked against.

Used by the tests of those algorithms. Costs are whole seconds and speeds halves, so that everything adds up without
rounding.
"""

from collections.abc import Iterator
from itertools import accumulate, combinations_with_replacement, pairwise

from hypothesis import strategies as st

from megatron_dyn.plan import MemoryBudget, SplitProblem


@st.composite
def plain_problems(draw: st.DrawFn, *, max_layers: int = 9, max_stages: int = 4) -> SplitProblem:
    """Equal speeds, no cap, nothing pinned; at least one layer for each stage."""
    num_stages = draw(st.integers(1, max_stages))
    num_layers = draw(st.integers(num_stages, max_layers))
    return SplitProblem(
        layer_seconds=tuple(float(draw(st.integers(0, 9))) for _ in range(num_layers)),
        num_stages=num_stages,
        first_seconds=float(draw(st.integers(0, 5))),
        last_seconds=float(draw(st.integers(0, 9))),
        layer_parameters=tuple(draw(st.integers(1, 9)) for _ in range(num_layers)),
        current=draw(st.none() | counts_for(num_layers, num_stages)),
    )


@st.composite
def hard_problems(draw: st.DrawFn) -> SplitProblem:
    """Speeds, a cap, layers that belong together and pins, each in some; many have no split."""
    plain = draw(plain_problems())
    num_layers, num_stages = len(plain.layer_seconds), plain.num_stages
    per_layer = st.tuples(*[st.integers(0, 5)] * num_layers)
    memory = MemoryBudget(
        state_bytes=draw(per_layer),
        activation_bytes=draw(per_layer),
        in_flight=tuple(range(num_stages, 0, -1)),
        first_bytes=draw(st.integers(0, 5)),
        last_bytes=draw(st.integers(0, 5)),
        cap_bytes=draw(st.integers(10, 80)),
    )
    return SplitProblem(
        layer_seconds=plain.layer_seconds,
        num_stages=num_stages,
        first_seconds=plain.first_seconds,
        last_seconds=plain.last_seconds,
        speeds=draw(st.none() | st.tuples(*[st.sampled_from([0.5, 1.0, 2.0])] * num_stages)),
        uncut=tuple(sorted(draw(st.sets(st.integers(1, num_layers - 1), max_size=2)))) if num_layers > 1 else (),
        pinned_first=draw(st.integers(0, 2)) if num_layers > 3 else 0,
        pinned_last=draw(st.integers(0, 1)),
        min_layers=draw(st.integers(0, 1)),
        current=plain.current,
        layer_parameters=plain.layer_parameters,
        memory=draw(st.none() | st.just(memory)),
    )


def counts_for(num_layers: int, num_stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Any split, empty stages included."""
    cuts = st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1).map(sorted)
    return cuts.map(lambda inner: tuple(end - start for start, end in pairwise([0, *inner, num_layers])))


def all_counts(num_layers: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    """Every split, empty stages included."""
    for cuts in combinations_with_replacement(range(num_layers + 1), num_stages - 1):
        yield tuple(end - start for start, end in pairwise([0, *cuts, num_layers]))


def seconds_by_stage(problem: SplitProblem, counts: tuple[int, ...]) -> list[float]:
    """Written apart from the library's own sum."""
    times = [sum(problem.layer_seconds[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    times[0] += problem.first_seconds
    times[-1] += problem.last_seconds
    return [time / speed for time, speed in zip(times, problem.speeds or [1.0] * len(times), strict=True)]


def is_allowed(problem: SplitProblem, counts: tuple[int, ...]) -> bool:
    """Whether the split meets every constraint."""
    boundaries = list(accumulate(counts, initial=0))
    if min(counts) < problem.min_layers or set(problem.uncut) & set(boundaries[1:-1]):
        return False
    if problem.num_stages > 1 and (counts[0] < problem.pinned_first or counts[-1] < problem.pinned_last):
        return False
    if problem.memory is None:
        return True
    stages = enumerate(pairwise(boundaries))
    return all(problem.memory.stage_bytes(stage, range(*span)) <= problem.memory.cap_bytes for stage, span in stages)


def best_seconds(problem: SplitProblem) -> float | None:
    """The fastest slowest stage, by trying every split; None when none is allowed."""
    splits = all_counts(len(problem.layer_seconds), problem.num_stages)
    return min((max(seconds_by_stage(problem, counts)) for counts in splits if is_allowed(problem, counts)), default=None)
