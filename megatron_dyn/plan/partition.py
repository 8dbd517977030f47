"""The exact min-max split of a sequence of layers over pipeline stages, with the fewest moved bytes among the best.

Called by `decide` and by offline tools with a SplitProblem; answers with a Split. It must not know layouts, micro-batch
schedules or measurement. The search runs on integers, so there is no rounding on which two ranks could differ.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.sweep import Sweep, closest_counts

_UNIT_BITS = 60
"""All times together are about 2**60 units: exact for layers down to 1/128 of the total, and sums fit in int64."""
_TIE = 10**12
"""Splits whose slowest stage is within one part in this many of the best count as equally fast."""


class InfeasibleSplit(ValueError):
    """No split meets the constraints. The message names the stage or layer, what was expected and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """Layers `0..n-1`, in order, to be cut into one run per stage. Times are seconds per micro-batch."""

    layer_seconds: tuple[float, ...]
    """By layer: forward plus backward."""
    num_stages: int
    first_seconds: float = 0.0
    """On the first stage whatever its layers: the embedding."""
    last_seconds: float = 0.0
    """On the last stage whatever its layers: final norm, head and loss."""
    min_layers: int = 1
    """The fewest layers a stage may hold: 0 or 1."""
    current: tuple[int, ...] | None = None
    """Layers per stage now; None when there is nothing to move from."""
    moved_bytes: tuple[int, ...] | None = None
    """By layer: what travels when it moves; None counts each layer as 1."""
    memory: MemoryBudget | None = None
    """Cap on the bytes of each stage; None: no cap."""

    def __post_init__(self) -> None:
        """Refuse tables that do not fit together and numbers that are no times or sizes; raises ValueError."""
        if self.num_stages < 1 or self.min_layers not in (0, 1):
            raise ValueError(
                f"SplitProblem: expected at least 1 stage and min_layers of 0 or 1, got {self.num_stages} stages and "
                f"min_layers {self.min_layers}"
            )
        names = [*(f"layer {layer}" for layer in range(len(self.layer_seconds))), "first_seconds", "last_seconds"]
        for name, seconds in zip(names, (*self.layer_seconds, self.first_seconds, self.last_seconds), strict=True):
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"SplitProblem: {name}: expected a time of at least 0, got {seconds}")
        self._check_tables(len(self.layer_seconds))

    def _check_tables(self, num_layers: int) -> None:
        counts, sizes, budget = self.current, self.moved_bytes, self.memory
        if counts is not None and (len(counts) != self.num_stages or sum(counts) != num_layers or min(counts) < 0):
            raise ValueError(
                f"SplitProblem: current {list(counts)} does not place {num_layers} layers on {self.num_stages} stages"
            )
        if sizes is not None and (len(sizes) != num_layers or min(sizes, default=0) < 0 or sum(sizes) >= 2**61):
            raise ValueError(
                f"SplitProblem: moved_bytes: expected {num_layers} sizes of at least 0 that sum below 2**61, got "
                f"{len(sizes)} with minimum {min(sizes, default=0)} and sum {sum(sizes)}"
            )
        if budget is not None and (len(budget.state_bytes), len(budget.in_flight)) != (num_layers, self.num_stages):
            raise ValueError(
                f"SplitProblem: memory: expected {num_layers} layers and {self.num_stages} stages, got "
                f"{len(budget.state_bytes)} and {len(budget.in_flight)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An answer to a SplitProblem."""

    counts: tuple[int, ...]
    """Layers per stage."""
    bottleneck_seconds: float
    """Time of the slowest stage for one micro-batch."""
    moved_layers: tuple[int, ...]
    """Ids of the layers that change their stage, ascending; empty without a current split."""
    moved_bytes: int
    """What they weigh together."""


def best_split(problem: SplitProblem) -> Split:
    """The split with the fastest slowest stage and, of all that reach it (to 1e-12 relative), the fewest moved bytes.

    Ties after that: the split whose first boundary is closest to the current one, then the lower boundary; then the
    same for the second boundary, and so on. Without a current split: the smallest counts in lexicographic order.
    Pure and deterministic. Raises InfeasibleSplit when no split meets `min_layers` and the memory cap.

    The search keeps `low <= best <= high`: `high` is what a constructed split reaches, `low` the smallest time of any
    run of layers on any stage that has not been ruled out. It ends when they meet, so the answer is exact.
    """
    if len(problem.layer_seconds) < problem.min_layers * problem.num_stages:
        raise InfeasibleSplit(
            f"expected at least {problem.num_stages} layers, one for each of {problem.num_stages} stages, got "
            f"{len(problem.layer_seconds)}"
        )
    if problem.memory is not None:
        _check_fixed(problem.memory)
    sweep = _sweep_of(problem)
    total = int(sweep.prefix[-1]) + sum(sweep.offsets)
    counts = sweep.split_within(total)
    if counts is None:
        raise InfeasibleSplit(_over_cap(problem))
    low = max(-(-total // problem.num_stages), *sweep.offsets, *np.diff(sweep.prefix).tolist())
    high = sweep.peak(counts)
    while low < high:
        # Not above 2 * low: the first split found may be `num_stages` times too slow, the best rarely twice `low`.
        bound = (low + min(high, 2 * low)) // 2
        counts = sweep.split_within(bound)
        if counts is None:
            low = sweep.next_time(bound)
        else:
            high = sweep.peak(counts)
    weight_prefix = np.array([0, *accumulate(_weights(problem))], dtype=np.int64)
    counts = closest_counts(sweep, bound=high + high // _TIE, weight_prefix=weight_prefix, current=problem.current)
    return _as_split(problem, counts)


def _weights(problem: SplitProblem) -> tuple[int, ...]:
    return (1,) * len(problem.layer_seconds) if problem.moved_bytes is None else problem.moved_bytes


def _sweep_of(problem: SplitProblem) -> Sweep:
    """The problem in integer units. The unit is a power of two, so scaling all times by one changes nothing."""
    seconds = (*problem.layer_seconds, problem.first_seconds, problem.last_seconds)
    shift = _UNIT_BITS - math.frexp(math.fsum(seconds))[1]
    *layers, first, last = (round(math.ldexp(value, shift)) for value in seconds)
    offsets = [0] * problem.num_stages
    offsets[0] += first
    offsets[-1] += last
    return Sweep(
        prefix=np.array([0, *accumulate(layers)], dtype=np.int64),
        offsets=tuple(offsets),
        min_layers=problem.min_layers,
        memory_ends=None if problem.memory is None else problem.memory.furthest_ends(),
    )


def _as_split(problem: SplitProblem, counts: tuple[int, ...]) -> Split:
    times = [list(problem.layer_seconds[start:end]) for start, end in pairwise(accumulate(counts, initial=0))]
    times[0].append(problem.first_seconds)
    times[-1].append(problem.last_seconds)
    moved: list[int] = []
    if problem.current is not None:
        stages = enumerate(zip(_stage_by_layer(problem.current), _stage_by_layer(counts), strict=True))
        moved = [layer for layer, (before, after) in stages if before != after]
    weights = _weights(problem)
    return Split(
        counts=counts,
        bottleneck_seconds=max(math.fsum(stage) for stage in times),
        moved_layers=tuple(moved),
        moved_bytes=sum(weights[layer] for layer in moved),
    )


def _stage_by_layer(counts: Sequence[int]) -> list[int]:
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _check_fixed(memory: MemoryBudget) -> None:
    for stage in range(len(memory.in_flight)):
        if memory.fixed_bytes(stage) > memory.cap_bytes:
            raise InfeasibleSplit(
                f"expected at most {memory.cap_bytes} bytes on each stage, got {memory.fixed_bytes(stage)} on stage "
                f"{stage} before it holds any layer"
            )


def _over_cap(problem: SplitProblem) -> str:
    """Which stage or layer breaks the cap. Only for problems without a split."""
    memory, num_layers, last = problem.memory, len(problem.layer_seconds), problem.num_stages - 1
    assert memory is not None, "without a cap every problem with enough layers has a split"
    # Between the ends a layer needs the fewest bytes where the fewest micro-batches are in flight.
    inner = min(range(1, last), key=memory.in_flight.__getitem__, default=0)
    for layer in range(num_layers):
        alone = range(layer, layer + 1)
        needed, stage = min((memory.stage_bytes(stage, alone), stage) for stage in (0, inner, last))
        if needed > memory.cap_bytes:
            return _too_many_bytes(memory, stage, alone, "where it needs the fewest")
    start, ends = 0, memory.furthest_ends()
    for stage in range(last):
        end = min(int(ends[stage, start]), num_layers - problem.min_layers * (last - stage))
        if end < start + problem.min_layers:
            return _too_many_bytes(memory, stage, range(start, start + 1), "with the stages filled in order")
        start = end
    return _too_many_bytes(memory, last, range(start, num_layers), "with the stages filled in order")


def _too_many_bytes(memory: MemoryBudget, stage: int, layers: range, when: str) -> str:
    held = f"layer {layers.start}" if len(layers) == 1 else f"layers {layers.start}..{layers.stop - 1}"
    return (
        f"expected at most {memory.cap_bytes} bytes on each stage, got {memory.stage_bytes(stage, layers)} on stage "
        f"{stage} for {held}, {when}"
    )
