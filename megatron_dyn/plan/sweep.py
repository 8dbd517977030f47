"""Reachability of contiguous splits on integer tables: can a bound be met, and by which split with the fewest moves.

The arithmetic behind `partition`, which owns the vocabulary and turns seconds into integer units. It must not know
seconds, layouts or reasons. A split is a walk over boundaries `0 = b0 <= b1 <= ... <= bp = n`. The *furthest end* of
start `a` on stage `s` is the largest `b` for which stage `s` may hold layers `a..b-1`. It grows with `a`, which is all
that the sweeps below rely on; with a memory cap the reachable boundaries can have holes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_NEVER = -(2**61)
"""Kept weight of a split that does not exist: negative whatever all layers, below 2**61 together, may add to it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sweep:
    """The tables of one problem. Times in units, all sums below 2**61."""

    prefix: IntArray
    """[layers + 1]: time of the layers before each boundary."""
    offsets: tuple[int, ...]
    """By stage: time it takes whatever its layers."""
    min_layers: int
    """The fewest layers of a stage: 0 or 1."""
    memory_ends: IntArray | None
    """[stages, layers + 1]: furthest end that memory allows, at least the start; None: no cap."""

    def furthest_ends(self, bound: int) -> list[IntArray]:
        """By stage, [layers + 1]: the furthest end of each start with at most `bound` on that stage.

        `bound` must be at least the largest offset; then no furthest end lies before its start.
        """
        by_offset = {offset: self._time_ends(bound, offset) for offset in dict.fromkeys(self.offsets)}
        if self.memory_ends is None:
            return [by_offset[offset] for offset in self.offsets]
        return [np.minimum(by_offset[offset], row) for offset, row in zip(self.offsets, self.memory_ends, strict=True)]

    def bands(self, furthest: Sequence[IntArray]) -> list[tuple[int, int]] | None:
        """(low, high) of each boundary `b0..bp`: nothing outside can be part of a split. None: there is no split.

        `high` comes from filling the stages from the front, `low` from the back. All real work happens between the
        two, which near the optimum are close together.
        """
        num_stages, num_layers = len(furthest), len(self.prefix) - 1
        highs, lows = [0], [num_layers]
        for stage, ends in enumerate(furthest):
            room_behind = self.min_layers * (num_stages - stage - 1)
            highs.append(min(int(ends[highs[-1]]), num_layers - room_behind))
        for stage in reversed(range(num_stages)):
            lows.append(max(int(furthest[stage].searchsorted(lows[-1])), self.min_layers * stage))
        found = list(zip(reversed(lows), highs, strict=True))
        return found if all(low <= high for low, high in found) else None

    def split_within(self, bound: int) -> tuple[int, ...] | None:
        """Counts of some split whose slowest stage takes at most `bound`; None when there is none."""
        furthest = self.furthest_ends(bound)
        bands = self.bands(furthest)
        if bands is None:
            return None
        completes = np.ones(1, dtype=bool)
        # latest[i]: for each boundary x in the band behind a stage, the last one up to x from which the stages behind
        # can hold all that is left. Bands alone do not tell: a layer too big for some stages leaves holes.
        latest = []
        for ends, (low, high), (next_low, next_high) in zip(reversed(furthest), bands[-2::-1], bands[:0:-1], strict=True):
            candidates = np.where(completes, np.arange(next_low, next_high + 1), -1)
            latest.append(np.maximum.accumulate(candidates))
            reach = np.minimum(ends[low : high + 1], next_high) - next_low
            completes = latest[-1][reach] >= np.arange(low, high + 1) + self.min_layers
        if not completes[0]:
            return None
        return self._walk(furthest, bands, latest[::-1])

    def _walk(
        self, furthest: Sequence[IntArray], bands: Sequence[tuple[int, int]], latest: Sequence[IntArray]
    ) -> tuple[int, ...]:
        counts, start = [], 0
        for ends, (low, high), choice in zip(furthest, bands[1:], latest, strict=True):
            end = int(choice[min(int(ends[start]), high) - low])
            counts.append(end - start)
            start = end
        return tuple(counts)

    def peak(self, counts: Sequence[int]) -> int:
        """Time of the slowest stage of a split."""
        ends = np.cumsum(counts)
        busy = self.prefix[ends] - self.prefix[ends - np.asarray(counts)] + np.asarray(self.offsets)
        return int(busy.max())

    def next_time(self, bound: int) -> int:
        """The smallest time above `bound` that any run of layers takes on any stage.

        No split has its slowest stage between `bound` and this. Only to be called for a bound that no split meets
        although splits exist, so that some run of layers exceeds it.
        """
        above = []
        for offset in dict.fromkeys(self.offsets):
            ends = self._time_ends(bound, offset)
            starts = np.flatnonzero(ends < len(self.prefix) - 1)
            if len(starts):
                above.append(int((self.prefix[ends[starts] + 1] - self.prefix[starts]).min()) + offset)
        return min(above)

    def _time_ends(self, bound: int, offset: int) -> IntArray:
        return np.searchsorted(self.prefix, self.prefix + (bound - offset), side="right") - 1


def closest_counts(sweep: Sweep, *, bound: int, weight_prefix: IntArray, current: Sequence[int] | None) -> tuple[int, ...]:
    """Of all splits within `bound` (there must be one), the one that keeps the most weight where it is.

    `weight_prefix`, [layers + 1], is the weight of the layers before each boundary. Ties: boundary by boundary from the
    first stage on, the closest to that of `current`, then the lowest. Without `current` nothing is kept: lowest first.

    What stage `s` keeps of layers `a..b-1` is `held(b) - held(a)`, where `held` is the weight prefix clamped to the
    stage's current layers. So the dynamic program over stages needs only a maximum over a window of ends per start.
    """
    furthest = sweep.furthest_ends(bound)
    bands = sweep.bands(furthest)
    assert bands is not None, "only to be called with a bound that some split meets"
    old = [0] * (len(furthest) + 1) if current is None else [0, *accumulate(current)]
    kept = np.zeros(1, dtype=np.int64)
    scores = []
    for stage in reversed(range(len(furthest))):
        (low, high), (next_low, next_high) = bands[stage], bands[stage + 1]
        starts, ends = np.arange(low, high + 1), np.arange(next_low, next_high + 1)
        scores.append(kept + weight_prefix[ends.clip(old[stage], old[stage + 1])])
        firsts = np.maximum(starts + sweep.min_layers, next_low)
        lasts = np.minimum(furthest[stage][low : high + 1], next_high)
        kept = _window_max(scores[-1], firsts - next_low, lasts - next_low)
        kept = kept - weight_prefix[starts.clip(old[stage], old[stage + 1])]
    return _walk_closest(sweep, furthest, bands, scores[::-1], old)


def _walk_closest(
    sweep: Sweep,
    furthest: Sequence[IntArray],
    bands: Sequence[tuple[int, int]],
    scores: Sequence[IntArray],
    old: Sequence[int],
) -> tuple[int, ...]:
    counts, start = [], 0
    for stage, score in enumerate(scores):
        low, high = bands[stage + 1]
        first = max(start + sweep.min_layers, low)
        window = score[first - low : min(int(furthest[stage][start]), high) - low + 1]
        best = first + np.flatnonzero(window == window.max())
        end = int(best[np.argmin(np.abs(best - old[stage + 1]))])
        counts.append(end - start)
        start = end
    return tuple(counts)


def _window_max(values: IntArray, firsts: IntArray, lasts: IntArray) -> IntArray:
    """[windows]: largest of `values[first..last]` for each window, or _NEVER for an empty one.

    A sparse table: row `k` holds the maxima of runs of `2**k` values, and two such runs cover any window.
    """
    lengths = lasts - firsts + 1
    levels = np.maximum(np.frexp(lengths)[1] - 1, 0)
    table = np.full((int(levels.max()) + 1, len(values)), _NEVER, dtype=np.int64)
    table[0] = values
    for level in range(1, len(table)):
        half = 1 << (level - 1)
        np.maximum(table[level - 1, :-half], table[level - 1, half:], out=table[level, :-half])
    some = lengths > 0
    left = np.where(some, firsts, 0)
    right = np.where(some, lasts + 1 - (1 << levels), 0)
    return np.where(some, np.maximum(table[levels, left], table[levels, right]), _NEVER)
