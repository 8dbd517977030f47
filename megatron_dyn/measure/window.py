"""Ring buffers of readings: warm-up discarded, median over what is left. Knows nothing of ranks or layouts."""

from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random
from statistics import median

from megatron_dyn.measure.recorder import Slot, StepReading


def is_sampled(step: int, interval: int) -> bool:
    """Whether `step` (1-based) is the one of its `interval` steps that is sampled; the same on every rank.

    Which one changes from interval to interval, at random. Were it always the last, costs that come around with a period
    that divides the interval (a hot spot that wanders over the layers) would look as if they stood still.
    """
    index, offset = divmod(step - 1, interval)
    block, turn = divmod(index, interval)
    return offset == _offsets(block, interval)[turn]


@lru_cache(maxsize=4)
def _offsets(block: int, interval: int) -> tuple[int, ...]:
    """Offsets for `interval` intervals in a row: each once, so that few samples already lie in different phases."""
    return tuple(Random(block).sample(range(interval), interval))


class Window:
    """The last `size` sampled steps under the current layout."""

    def __init__(self, size: int) -> None:
        """`size` of at least 1."""
        self._readings: deque[StepReading] = deque(maxlen=size)
        self._size = size

    def add(self, reading: StepReading) -> None:
        """Add a sampled step; the oldest falls out when the window is full.

        Steps with another number of micro-batches (a batch size that ramps up) are not compared: they start it anew.
        """
        if self._readings and reading.num_microbatches != self.num_microbatches:
            self._readings.clear()
        self._readings.append(reading)

    def clear(self) -> None:
        """Forget all: the layout changed, old times say nothing about it."""
        self._readings.clear()

    def __len__(self) -> int:
        """Readings held."""
        return len(self._readings)

    @property
    def full(self) -> bool:
        """Whether a decision may rest on this window."""
        return len(self._readings) == self._size

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of the newest step."""
        return self._readings[-1].num_microbatches if self._readings else 0

    def __iter__(self) -> Iterator[StepReading]:
        """The readings, oldest first."""
        return iter(self._readings)

    def medians(self) -> Mapping[Slot, float]:
        """Median seconds per step of every slot; a slot that a step lacks counts as zero there."""
        slots = {slot: None for reading in self._readings for slot in reading.seconds}
        return {slot: median(reading.seconds.get(slot, 0.0) for reading in self._readings) for slot in slots}


class StepTimes:
    """Wall seconds of whole steps under the current layout; the first `warmup_steps` after a change are dropped.

    Sampled steps are a little slower (hooks), so they count only where every step is sampled.
    """

    SIZE = 32
    """Newest steps that are kept."""

    def __init__(self, *, warmup_steps: int) -> None:
        """`warmup_steps` of at least 0."""
        self._warmup_steps = warmup_steps
        self._plain: deque[float] = deque(maxlen=self.SIZE)
        self._sampled: deque[float] = deque(maxlen=self.SIZE)
        self._num_seen = 0

    def add(self, seconds: float, *, sampled: bool = False) -> None:
        """Add one step."""
        self._num_seen += 1
        if self._num_seen > self._warmup_steps:
            (self._sampled if sampled else self._plain).append(seconds)

    def restart(self) -> None:
        """The layout changed."""
        self._plain.clear()
        self._sampled.clear()
        self._num_seen = 0

    def forget(self) -> None:
        """Layers cost something else now, on the same layout: nothing has to warm up again."""
        self._plain.clear()
        self._sampled.clear()

    def __len__(self) -> int:
        """Steps that count."""
        return len(self._plain or self._sampled)

    @property
    def warm(self) -> bool:
        """Whether the warm-up after the last change is over."""
        return self._num_seen >= self._warmup_steps

    @property
    def median_seconds(self) -> float | None:
        """Median step time; None before the first step that counts."""
        counted = self._plain or self._sampled
        return median(counted) if counted else None
