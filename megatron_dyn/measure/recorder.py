"""Turns a stream of "from now on, time belongs to ..." marks into seconds per piece of the model.

The host's hooks call `switch`; the recorder only knows slots and a Clock. Every moment of a step belongs to exactly one
slot, so the slots add up to the step: nothing is counted twice and nothing is lost.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from megatron_dyn.ports import Clock


class Kind(StrEnum):
    """What a moment of a step can belong to."""

    LAYER = "layer"
    EMBEDDING = "embedding"
    HEAD = "head"
    OTHER = "other"
    """Compute inside a forward or backward step that belongs to no layer and no end."""
    WAIT = "wait"
    """Inside a point-to-point call of the schedule: transfer and idle time."""
    SCHEDULE = "schedule"
    """Between the steps: bookkeeping, gradient reduction over data-parallel replicas."""
    OPTIMIZER = "optimizer"


class Slot(NamedTuple):
    """One account of time."""

    kind: Kind
    layer: int = -1
    """Global layer id for Kind.LAYER, else -1."""
    backward: bool = False


IDLE = Slot(Kind.SCHEDULE)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReading:
    """Seconds per slot over one whole step (all micro-batches)."""

    iteration: int
    num_microbatches: int
    seconds: Mapping[Slot, float]


class Recorder:
    """Records one sampled step after another. One instance per rank; not thread-safe (hooks run in one thread)."""

    def __init__(self, clock: Clock) -> None:
        """`clock` is a perf_counter on the CPU and CUDA events on a GPU."""
        self._clock = clock
        self._marks: list[tuple[Slot, Any]] = []
        self._current = IDLE
        self._num_microbatches = 0

    @property
    def current(self) -> Slot:
        """To whom time belongs now."""
        return self._current

    def begin(self) -> None:
        """Start a step."""
        self._marks = []
        self._num_microbatches = 0
        self.switch(IDLE)

    def switch(self, slot: Slot) -> Slot:
        """From now on time belongs to `slot`; returns the previous owner so that nested calls can give it back."""
        previous, self._current = self._current, slot
        self._marks.append((slot, self._clock.mark()))
        return previous

    def count_microbatch(self) -> None:
        """One forward step has begun."""
        self._num_microbatches += 1

    def end(self, iteration: int) -> StepReading:
        """Close the step and read it. May wait for the device: call it after the step, never inside."""
        self.switch(IDLE)
        self._clock.settle()
        seconds: dict[Slot, float] = defaultdict(float)
        for (slot, start), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[slot] += self._clock.seconds_between(start, end)
        self._marks = []
        return StepReading(iteration=iteration, num_microbatches=max(self._num_microbatches, 1), seconds=dict(seconds))
