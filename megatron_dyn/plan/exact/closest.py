"""Of all contiguous splits within a bound, the one that moves the least: the tie-break behind the exact algorithm.

Works on the integer tables of a Sweep, for `partition` and the windows of `interleaved`. It must not know seconds or
layouts.
"""

from collections.abc import Callable, Sequence

import numpy as np

from megatron_dyn.plan.exact.sweep import Sweep
from megatron_dyn.plan.exact.tables import IntArray

_NEVER = -(2**61)
"""Kept weight of a split that does not exist: negative whatever all layers, below 2**61 together, may add to it."""


def closest_counts(
    sweep: Sweep, *, bound: int, held: Callable[[int], IntArray], places: IntArray, old: Sequence[int]
) -> tuple[int, ...]:
    """Of all splits within `bound` (there must be one), the one that keeps the most weight where it is.

    `held(stage)`, [items + 1], is the weight of those items before each boundary that are on that stage now; a stage
    keeps `held(b) - held(a)` of items `a..b-1`, so the dynamic program over stages needs only a maximum over a window
    of ends per start. Ties: boundary by boundary from the first stage on, the one whose place (`places`, [items + 1])
    is closest to that in `old`, [stages + 1], then the lowest.
    """
    loads = sweep.loads_within(bound)
    bands = None if loads is None else sweep.bands(loads)
    assert loads is not None and bands is not None, "only to be called with a bound that some split meets"
    kept = np.zeros(1, dtype=np.int64)
    scores, lasts = [], []
    for stage in reversed(range(len(loads))):
        (low, high), (next_low, next_high) = bands[stage], bands[stage + 1]
        starts, weights = np.arange(low, high + 1), held(stage)
        scores.append(kept + weights[next_low : next_high + 1])
        firsts = np.maximum(starts + sweep.least[stage], next_low)
        lasts.append(np.minimum(sweep.ends(stage, loads[stage], low, high), next_high))
        kept = _window_max(scores[-1], firsts - next_low, lasts[-1] - next_low)
        kept = kept - weights[low : high + 1]
    counts, start = [], 0
    for stage, (score, last) in enumerate(zip(reversed(scores), reversed(lasts), strict=True)):
        next_low = bands[stage + 1][0]
        first = max(start + sweep.least[stage], next_low)
        window = score[first - next_low : int(last[start - bands[stage][0]]) - next_low + 1]
        best = first + np.flatnonzero(window == window.max())
        end = int(best[np.argmin(np.abs(places[best] - old[stage + 1]))])
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
