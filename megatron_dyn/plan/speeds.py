"""Tells a slow rank from a heavy layer: what a layer took on one rank against what it took on another.

Seconds of a layer are its work over the speed of the rank that ran it. From one rank alone the two cannot be told apart,
and this module says so. Once the same layer, or one declared to be alike, was timed on two ranks, their speeds compare.
Used by `decide`'s caller (a SpeedHistory over the moves of a run) and by the command (observations in a timing file).
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median, median_high

from megatron_dyn.records import NOTABLE_SPEED, Snapshot

_CONTRADICTION = 1.5
"""Comparisons of two ranks that differ by more than this factor say nothing: the layers' costs changed in between."""
_RECENT = 8
"""Newest comparisons of two ranks that count."""


class Verdict(StrEnum):
    """Why a stage takes as long as it does."""

    EVEN = "even"
    """No slower than the others."""
    SLOW_DEVICE = "slow device"
    """Its rank needs longer for the same layer: give it fewer layers, and look at the machine."""
    HEAVY_STAGE = "heavy stage"
    """It holds more work: give layers away."""
    UNTOLD = "can't be told yet"
    """Slower than the others, and no layer of it was timed on another rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One layer timed on one rank."""

    layer: int
    """Global 0-based id."""
    pp_rank: int
    seconds: float
    """Forward plus backward of one micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedEstimate:
    """How fast ranks are, relative to the upper median of those that could be compared: of two, to the faster."""

    speeds: tuple[float | None, ...]
    """By pp_rank; None: nothing links it to the largest group of ranks that were compared."""

    @property
    def usable(self) -> tuple[float, ...] | None:
        """Speeds with 1 for ranks that are not known; None when no known one differs notably."""
        known = tuple(1.0 if speed is None else speed for speed in self.speeds)
        return known if any(_differs(speed) for speed in known) else None


def estimate_speeds(
    observations: Sequence[Observation], num_stages: int, *, alike: Mapping[int, Hashable] | None = None
) -> SpeedEstimate:
    """Speeds from layers timed on more than one rank; `alike` maps layer ids to kinds whose layers do the same work.

    Raises ValueError for ranks out of range and times that are not above 0.
    """
    by_work: dict[Hashable, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for seen in observations:
        if not (math.isfinite(seen.seconds) and seen.seconds > 0.0):
            raise ValueError(f"observation of layer {seen.layer}: expected seconds above 0, got {seen.seconds}")
        if not 0 <= seen.pp_rank < num_stages:
            raise ValueError(f"observation of layer {seen.layer}: expected a rank below {num_stages}, got {seen.pp_rank}")
        work = ("layer", seen.layer) if alike is None or seen.layer not in alike else ("kind", alike[seen.layer])
        by_work[work][seen.pp_rank].append(seen.seconds)
    ratios: list[tuple[int, int, float]] = []
    for times in by_work.values():
        ranks = sorted(times)
        ratios += [
            (first, second, median(times[first]) / median(times[second]))
            for index, first in enumerate(ranks)
            for second in ranks[index + 1 :]
        ]
    return _solve(ratios, num_stages)


def verdicts(stage_seconds: Sequence[float], estimate: SpeedEstimate) -> tuple[Verdict, ...]:
    """Why each stage takes what it takes: `stage_seconds` by pp_rank, as measured there."""
    work = [seconds * (1.0 if speed is None else speed) for seconds, speed in zip(stage_seconds, estimate.speeds, strict=True)]
    typical_work, typical_seconds = median(work), median(stage_seconds)

    def judge(pp_rank: int) -> Verdict:
        speed = estimate.speeds[pp_rank]
        if speed is not None and speed < 1.0 and _differs(speed):
            return Verdict.SLOW_DEVICE
        if stage_seconds[pp_rank] <= typical_seconds * (1.0 + NOTABLE_SPEED):
            return Verdict.EVEN
        if speed is None:
            return Verdict.UNTOLD
        return Verdict.HEAVY_STAGE if work[pp_rank] > typical_work * (1.0 + NOTABLE_SPEED) else Verdict.EVEN

    return tuple(judge(pp_rank) for pp_rank in range(len(stage_seconds)))


Timed = tuple[int, float]
"""(pp_rank, seconds) of a layer."""


def changes_of_stayed(before: Sequence[Timed], after: Sequence[Timed]) -> Mapping[int, Sequence[float]]:
    """By pp_rank: how many times as much each layer that stayed there takes as before. Their median is the drift."""
    stayed: dict[int, list[float]] = defaultdict(list)
    for (source, was), (destination, now) in zip(before, after, strict=True):
        if source == destination and was > 0.0 and now > 0.0:
            stayed[destination].append(now / was)
    return stayed


def drift_of(stayed: Mapping[int, Sequence[float]]) -> float:
    """What all layers drifted by, judged by those that stayed (`changes_of_stayed`); 1 when none did."""
    return median([change for of_rank in stayed.values() for change in of_rank] or [1.0])


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedHistory:
    """What the moves of a run told about its ranks. Equal on all ranks if all observe the same snapshots."""

    last: tuple[tuple[int, float], ...] = ()
    """By layer: (pp_rank, seconds) in the last snapshot."""
    ratios: tuple[tuple[int, int, float], ...] = ()
    """(rank before, rank after, how many times faster the second was) of each layer that was timed on both."""

    def observe(self, snapshot: Snapshot) -> "SpeedHistory":
        """This history with one more snapshot.

        Layers that moved since the last one compare their two ranks. What the layers that stayed changed by meanwhile,
        as a median, is taken out: costs of all layers may drift while the model trains. Where layers that stayed did not
        change alike, layers that moved need not have either (some froze, or were pruned), and nothing is compared. A
        rank whose own layers changed against those of the others is forgotten: it may have got slower, or well again.
        """
        now = tuple(zip(snapshot.layout.stage_of(), (cost.seconds for cost in snapshot.layers), strict=True))
        if len(self.last) != len(now):
            return SpeedHistory(last=now)
        stayed = changes_of_stayed(self.last, now)
        drift = drift_of(stayed)
        changed = {rank for rank, of_rank in stayed.items() if _differs(median(of_rank) / drift)}
        kept = tuple(ratio for ratio in self.ratios if not changed & set(ratio[:2]))
        if any(_differs(change / drift) for of_rank in stayed.values() for change in of_rank):
            return SpeedHistory(last=now, ratios=kept)
        found = tuple(
            (source, destination, drift * was / seconds)
            for (source, was), (destination, seconds) in zip(self.last, now, strict=True)
            if source != destination and was > 0.0 and seconds > 0.0
        )
        return SpeedHistory(last=now, ratios=_newest((*kept, *found)))

    def estimate(self, num_stages: int) -> SpeedEstimate:
        """What is known of the ranks' speeds by now."""
        return _solve([_upward(ratio) for ratio in self.ratios], num_stages)


def _differs(speed: float) -> bool:
    return abs(math.log(speed)) > math.log1p(NOTABLE_SPEED)


def _upward(ratio: tuple[int, int, float]) -> tuple[int, int, float]:
    """The comparison with the lower rank first."""
    first, second, faster = ratio
    return ratio if first < second else (second, first, 1.0 / faster)


def _newest(ratios: tuple[tuple[int, int, float], ...]) -> tuple[tuple[int, int, float], ...]:
    """The last _RECENT comparisons of each pair of ranks, oldest first."""
    kept: list[tuple[int, int, float]] = []
    counts: dict[tuple[int, int], int] = defaultdict(int)
    for ratio in reversed(ratios):
        pair = _upward(ratio)[:2]
        counts[pair] += 1
        if counts[pair] <= _RECENT:
            kept.append(ratio)
    return tuple(reversed(kept))


def _solve(ratios: Sequence[tuple[int, int, float]], num_stages: int) -> SpeedEstimate:
    """Speeds from comparisons (lower rank, higher rank, how many times faster the higher one is).

    Along a spanning tree of each group of linked ranks, nearest first: with few comparisons a least-squares fit would
    give the same numbers, and this way no rank's error reaches those that were compared directly.
    """
    pairs: dict[tuple[int, int], list[float]] = defaultdict(list)
    for first, second, faster in ratios:
        pairs[first, second].append(faster)
    links: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for (first, second), seen in sorted(pairs.items()):
        if max(seen) <= _CONTRADICTION * min(seen):
            links[first].append((second, median(seen)))
            links[second].append((first, 1.0 / median(seen)))
    best: dict[int, float] = {}
    done: set[int] = set()
    for root in sorted(links):
        if root in done:
            continue
        group, queue = {root: 1.0}, [root]
        for rank in queue:
            for other, faster in links[rank]:
                if other not in group:
                    group[other] = group[rank] * faster
                    queue.append(other)
        done |= group.keys()
        best = max(best, group, key=len)
    typical = median_high(best.values()) if best else 1.0
    return SpeedEstimate(speeds=tuple(best[rank] / typical if rank in best else None for rank in range(num_stages)))
