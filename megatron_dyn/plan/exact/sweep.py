"""Reachability of contiguous splits on integer tables: can a bound be met, and how low a bound can.

The arithmetic behind `partition` and behind the windows of `interleaved`. It must not know seconds, layouts or reasons.
A split is a walk over boundaries `0 = b0 <= b1 <= ... <= bp = n`. The *furthest end* of start `a` on stage `s` is the
largest `b` for which stage `s` may hold items `a..b-1`. It grows with `a`, which is all that the sweeps below rely on;
the reachable boundaries can have holes, where an item fits only some stages.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np

from megatron_dyn.plan.exact.tables import IntArray, Rate

_LARGEST = 2**61
"""Beyond all loads together; sums of two such numbers still fit in int64."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByteTable:
    """What the items need on each stage, and the most that a stage may need."""

    needed: IntArray
    """[stages, items + 1]: bytes that the items before each boundary would add to each stage."""
    fixed: tuple[int, ...]
    """By stage: bytes whatever its items; at most `cap_bytes`."""
    cap_bytes: int

    def ends(self, stage: int, low: int, high: int) -> IntArray:
        """[high - low + 1]: the furthest end that memory allows for each start in `low..high`."""
        row = self.needed[stage]
        ends: IntArray = row.searchsorted(row[low : high + 1] + (self.cap_bytes - self.fixed[stage]), side="right") - 1
        return ends

    def end(self, stage: int, start: int) -> int:
        """The furthest end that memory allows."""
        row = self.needed[stage]
        return int(row.searchsorted(row[start] + (self.cap_bytes - self.fixed[stage]), side="right")) - 1

    def start(self, stage: int, end: int) -> int:
        """The first start from which memory allows `end`."""
        row = self.needed[stage]
        return int(row.searchsorted(row[end] - (self.cap_bytes - self.fixed[stage]), side="left"))

    def peak(self, counts: Sequence[int]) -> int:
        """Bytes of the stage of a split that needs the most."""
        ends, stages = np.cumsum(counts), np.arange(len(counts))
        held = self.needed[stages, ends] - self.needed[stages, ends - np.asarray(counts)] + np.asarray(self.fixed)
        return int(held.max())


@dataclass(frozen=True, kw_only=True, eq=False)
class Sweep:
    """The tables of one walk. Loads in units, all sums below 2**61. A stage here is one chunk."""

    prefix: Sequence[int]
    """[items + 1]: load of the items before each boundary."""
    fixed: Sequence[int]
    """By stage: load whatever its items."""
    rates: Sequence[Rate]
    """By stage."""
    least: Sequence[int]
    """By stage: the fewest items, together at most all."""
    memory: ByteTable | None
    """None: no cap."""

    @cached_property
    def steps(self) -> IntArray:
        """`prefix` as an array."""
        return np.array(self.prefix, dtype=np.int64)

    @cached_property
    def _behind(self) -> list[int]:
        """[stages + 1]: the fewest items of the stages from each on."""
        return list(accumulate(reversed(self.least), initial=0))[::-1]

    def loads_within(self, bound: int) -> list[int] | None:
        """By stage: the most load of items within the time `bound`; None when a stage exceeds it without any item."""
        loads = [min(rate.load_within(bound) - load, _LARGEST) for rate, load in zip(self.rates, self.fixed, strict=True)]
        return loads if min(loads) >= 0 else None

    def split_within(self, bound: int) -> tuple[int, ...] | None:
        """Counts of some split whose slowest stage takes at most `bound`; None when there is none.

        Mostly the stages can simply be filled from the front. Where that leaves a later stage with too few items, some
        item fits only some of the stages, and only the sweep from behind tells.
        """
        loads = self.loads_within(bound)
        if loads is None:
            return None
        highs = self._fill(loads)
        if highs[-1] < len(self.prefix) - 1:
            return None
        counts = tuple(end - start for start, end in pairwise(highs))
        return counts if all(map(int.__ge__, counts, self.least)) else self._thread(loads)

    def bands(self, loads: Sequence[int]) -> list[tuple[int, int]] | None:
        """(low, high) of each boundary `b0..bp`: nothing outside can be part of a split. None: there is no split.

        `high` comes from filling the stages from the front, `low` from the back. All real work happens between the
        two, which near the optimum are close together.
        """
        lows = [len(self.prefix) - 1]
        before = self._behind[0]
        for stage in reversed(range(len(loads))):
            before -= self.least[stage]
            start = bisect_left(self.prefix, self.prefix[lows[-1]] - loads[stage])
            if self.memory is not None:
                start = max(start, self.memory.start(stage, lows[-1]))
            lows.append(max(start, before))
        found = list(zip(reversed(lows), self._fill(loads), strict=True))
        return found if all(low <= high for low, high in found) else None

    def ends(self, stage: int, load: int, low: int, high: int) -> IntArray:
        """[high - low + 1]: the furthest end of each start in `low..high` with at most `load` on `stage`."""
        ends = self.steps.searchsorted(self.steps[low : high + 1] + load, side="right") - 1
        return ends if self.memory is None else np.minimum(ends, self.memory.ends(stage, low, high))

    def peak(self, counts: Sequence[int]) -> int:
        """Time of the slowest stage of a split."""
        runs = pairwise(accumulate(counts, initial=0))
        loads = (load + self.prefix[end] - self.prefix[start] for load, (start, end) in zip(self.fixed, runs, strict=True))
        return max(rate.time(load) for rate, load in zip(self.rates, loads, strict=True))

    def fastest(self, floor: int, ceiling: int) -> tuple[int, tuple[int, ...]] | None:
        """The least time of the slowest stage, or `floor` if that is longer, and a split within it; None above `ceiling`.

        The search keeps `low <= best <= high`, where `high` is what a constructed split reaches, and ends when they
        meet, so the answer is exact.
        """
        counts = self.split_within(ceiling)
        if counts is None:
            return None
        low, high = floor, max(floor, self.peak(counts))
        while low < high:
            # Not above 2 * low: the first split found may be `num_stages` times too slow, the best rarely twice `low`.
            bound = (low + min(high, 2 * low)) // 2
            found = self.split_within(bound)
            if found is None:
                low = bound + 1
            else:
                counts, high = found, max(floor, self.peak(found))
        return high, counts

    def leanest(self, bound: int) -> int:
        """The fewest bytes that any cap could be lowered to while `bound`, which some split meets, is still met."""
        memory = self.memory
        assert memory is not None, "only to be called with a table of bytes"
        counts = self.split_within(bound)
        assert counts is not None, "only to be called with a bound that some split meets"
        low, high = max(memory.fixed), memory.peak(counts)
        while low < high:
            cap_bytes = (low + high) // 2
            found = replace(self, memory=replace(memory, cap_bytes=cap_bytes)).split_within(bound)
            if found is None:
                low = cap_bytes + 1
            else:
                high = memory.peak(found)
        return high

    def _fill(self, loads: Sequence[int]) -> list[int]:
        """[stages + 1]: the boundaries when each stage in turn takes all it can and leaves what the later ones must hold."""
        prefix, memory, last = self.prefix, self.memory, len(self.prefix) - 1
        highs = [0]
        for stage, load in enumerate(loads):
            start = highs[-1]
            end = bisect_right(prefix, prefix[start] + load, start) - 1
            if memory is not None:
                end = min(end, memory.end(stage, start))
            highs.append(min(end, last - self._behind[stage + 1]))
        return highs

    def _thread(self, loads: Sequence[int]) -> tuple[int, ...] | None:
        """A split around the holes; None when there is none."""
        bands = self.bands(loads)
        if bands is None:
            return None
        completes = np.ones(1, dtype=bool)
        # latest[i]: for each boundary x in the band behind a stage, the last one up to x from which the stages behind
        # can hold all that is left. Bands alone do not tell: an item too big for some stages leaves holes.
        latest, reaches = [], []
        for stage in reversed(range(len(loads))):
            (low, high), (next_low, next_high) = bands[stage], bands[stage + 1]
            candidates = np.where(completes, np.arange(next_low, next_high + 1), -1)
            latest.append(np.maximum.accumulate(candidates))
            reaches.append(np.minimum(self.ends(stage, loads[stage], low, high), next_high) - next_low)
            completes = latest[-1][reaches[-1]] >= np.arange(low, high + 1) + self.least[stage]
        if not completes[0]:
            return None
        counts, start = [], 0
        for (low, _), reach, choice in zip(bands, reversed(reaches), reversed(latest), strict=False):
            end = int(choice[reach[start - low]])
            counts.append(end - start)
            start = end
        return tuple(counts)
