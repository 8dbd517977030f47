"""What is to be split and what an answer looks like: SplitProblem, Split, and the error for problems without an answer.

Shared by every algorithm, built by whoever wants a split. It must not know how splits are found, layouts or schedules.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_dyn.plan.memory import MemoryBudget


class InfeasibleSplit(ValueError):
    """No split meets the constraints. The message names the stage or layer, what was expected and what was found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """Layers `0..n-1`, in order, to be cut into one run per chunk. Times are seconds per micro-batch.

    Chunk `c` is on stage `c % num_stages`; a stage is as slow as all its chunks together. Without virtual stages chunk
    and stage are the same.
    """

    layer_seconds: tuple[float, ...]
    """By layer: forward plus backward, on a stage of speed 1."""
    num_stages: int
    num_chunks: int | None = None
    """Chunks that may hold layers: chunks `0..num_chunks-1`. None: one for each stage."""
    first_seconds: float = 0.0
    """On the first chunk whatever its layers: the embedding."""
    last_seconds: float = 0.0
    """On the last of the `num_chunks` chunks whatever its layers: final norm, head and loss, where they are there."""
    stage_seconds: tuple[float, ...] | None = None
    """By pp_rank: what else the stage computes whatever its layers, such as chunks that hold only an end; None: nothing."""
    speeds: tuple[float, ...] | None = None
    """By pp_rank: how many times faster than the costs say; None: all 1. Seconds of a stage are its costs over its speed."""
    uncut: tuple[int, ...] = ()
    """Layers that must be on one chunk with the layer before them."""
    pinned_first: int = 0
    """Leading layers that stay on the first chunk."""
    pinned_last: int = 0
    """Trailing layers that stay on the last of the `num_chunks` chunks: 1 when MTP layers are there."""
    min_layers: int = 1
    """The fewest layers a chunk may hold: 0 or 1."""
    current: tuple[int, ...] | None = None
    """Layers per chunk now; None when there is nothing to move from. It need not meet the constraints itself."""
    moved_bytes: tuple[int, ...] | None = None
    """By layer: what travels when it moves; None counts each layer as 1."""
    layer_parameters: tuple[int, ...] | None = None
    """By layer: parameters, for the algorithms that balance those; None: not known."""
    memory: MemoryBudget | None = None
    """Cap on the bytes of each stage; None: no cap."""

    def __post_init__(self) -> None:
        """Refuse tables that do not fit together and numbers that are no times or sizes; raises ValueError."""
        if self.num_stages < 1 or self.min_layers not in (0, 1):
            raise ValueError(
                f"SplitProblem: expected at least 1 stage and min_layers of 0 or 1, got {self.num_stages} stages and "
                f"min_layers {self.min_layers}"
            )
        if self.num_chunks is not None and self.num_chunks < 1:
            raise ValueError(f"SplitProblem: num_chunks: expected at least 1, got {self.num_chunks}")
        self._check_times()
        self._check_constraints(len(self.layer_seconds))
        self._check_tables(len(self.layer_seconds))

    @property
    def num_runs(self) -> int:
        """How many runs the layers are cut into: `num_chunks`, or one for each stage."""
        return self.num_stages if self.num_chunks is None else self.num_chunks

    @property
    def weights(self) -> tuple[int, ...]:
        """By layer: what counts when it moves: `moved_bytes`, or 1."""
        return (1,) * len(self.layer_seconds) if self.moved_bytes is None else self.moved_bytes

    def stage_of(self, counts: Sequence[int]) -> list[int]:
        """The pp_rank of layer 0, 1, 2, ... when the chunks hold `counts` layers."""
        return [chunk % self.num_stages for chunk, count in enumerate(counts) for _ in range(count)]

    def bottleneck_seconds(self, counts: Sequence[int]) -> float:
        """Time of the slowest stage for one micro-batch when the chunks hold `counts` layers, ends and speeds included."""
        costs = [[extra] for extra in self.stage_seconds or (0.0,) * self.num_stages]
        for chunk, (start, end) in enumerate(pairwise(accumulate(counts, initial=0))):
            costs[chunk % self.num_stages] += self.layer_seconds[start:end]
        costs[0].append(self.first_seconds)
        costs[(self.num_runs - 1) % self.num_stages].append(self.last_seconds)
        speeds = self.speeds or (1.0,) * self.num_stages
        return max(math.fsum(cost) / speed for cost, speed in zip(costs, speeds, strict=True))

    def split(self, counts: Sequence[int], *, bound_seconds: float | None = None, rounds: int | None = None) -> "Split":
        """The Split that `counts` layers per chunk make: every algorithm, exact or not, is scored here.

        `bound_seconds` is what no split can beat; None says that this one is proved best. Raises ValueError when the
        counts do not place every layer once.
        """
        if not self._places_all(counts):
            raise ValueError(
                f"SplitProblem: counts {list(counts)} do not place {len(self.layer_seconds)} layers on {self._runs_text}"
            )
        bottleneck_seconds = self.bottleneck_seconds(counts)
        moved: list[int] = []
        if self.current is not None:
            stages = enumerate(zip(self.stage_of(self.current), self.stage_of(counts), strict=True))
            moved = [layer for layer, (before, after) in stages if before != after]
        return Split(
            counts=tuple(counts),
            bottleneck_seconds=bottleneck_seconds,
            moved_layers=tuple(moved),
            moved_bytes=sum(self.weights[layer] for layer in moved),
            # A rounded bound must not exclude the very split that reaches it.
            bound_seconds=bottleneck_seconds if bound_seconds is None else min(bound_seconds, bottleneck_seconds),
            rounds=rounds,
        )

    def _places_all(self, counts: Sequence[int]) -> bool:
        return len(counts) == self.num_runs and sum(counts) == len(self.layer_seconds) and min(counts) >= 0

    @property
    def _runs_text(self) -> str:
        return f"{self.num_runs} {'stages' if self.num_runs == self.num_stages else 'chunks'}"

    def _check_times(self) -> None:
        named = [(f"layer {layer}", seconds) for layer, seconds in enumerate(self.layer_seconds)]
        named += [("first_seconds", self.first_seconds), ("last_seconds", self.last_seconds)]
        named += [(f"stage_seconds[{stage}]", seconds) for stage, seconds in enumerate(self.stage_seconds or ())]
        for name, seconds in named:
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"SplitProblem: {name}: expected a time of at least 0, got {seconds}")
        for stage, speed in enumerate(self.speeds or ()):
            if not (math.isfinite(speed) and speed > 0.0):
                raise ValueError(f"SplitProblem: speeds[{stage}]: expected a finite speed above 0, got {speed}")
        for name, table in (("stage_seconds", self.stage_seconds), ("speeds", self.speeds)):
            if table is not None and len(table) != self.num_stages:
                raise ValueError(f"SplitProblem: {name}: expected one for each of {self.num_stages} stages, got {len(table)}")

    def _check_constraints(self, num_layers: int) -> None:
        for index, layer in enumerate(self.uncut):
            if not 1 <= layer < num_layers:
                raise ValueError(
                    f"SplitProblem: uncut[{index}]: expected a layer with one before it, 1..{num_layers - 1}, got {layer}"
                )
        if min(self.pinned_first, self.pinned_last) < 0 or self.pinned_first + self.pinned_last > num_layers:
            raise ValueError(
                f"SplitProblem: pinned_first and pinned_last: expected at least 0 each and at most {num_layers} layers "
                f"together, got {self.pinned_first} and {self.pinned_last}"
            )

    def _check_tables(self, num_layers: int) -> None:
        budget = self.memory
        if self.current is not None and not self._places_all(self.current):
            raise ValueError(
                f"SplitProblem: current {list(self.current)} does not place {num_layers} layers on {self._runs_text}"
            )
        for name, sizes in (("moved_bytes", self.moved_bytes), ("layer_parameters", self.layer_parameters)):
            if sizes is not None and (len(sizes) != num_layers or min(sizes, default=0) < 0 or sum(sizes) >= 2**61):
                raise ValueError(
                    f"SplitProblem: {name}: expected {num_layers} sizes of at least 0 that sum below 2**61, got "
                    f"{len(sizes)} with minimum {min(sizes, default=0)} and sum {sum(sizes)}"
                )
        if budget is None:
            return
        if (len(budget.state_bytes), len(budget.in_flight)) != (num_layers, self.num_runs):
            raise ValueError(
                f"SplitProblem: memory: expected {num_layers} layers and {self._runs_text}, got "
                f"{len(budget.state_bytes)} and {len(budget.in_flight)}"
            )
        if budget.rank_bytes is not None and len(budget.rank_bytes) != self.num_stages:
            raise ValueError(
                f"SplitProblem: memory.rank_bytes: expected one for each of {self.num_stages} stages, got "
                f"{len(budget.rank_bytes)}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """An answer to a SplitProblem."""

    counts: tuple[int, ...]
    """Layers per chunk."""
    bottleneck_seconds: float
    """Time of the slowest stage for one micro-batch."""
    moved_layers: tuple[int, ...]
    """Ids of the layers that change their stage, ascending; empty without a current split."""
    moved_bytes: int
    """What they weigh together."""
    bound_seconds: float = 0.0
    """No split that meets the constraints has a slowest stage below this; equal to `bottleneck_seconds` when proved best."""
    rounds: int | None = None
    """Rounds an iterative algorithm took; None for the others."""
    step_proved: bool = False
    """Whether every split that could have a shorter simulated step was tried."""
