"""A SplitProblem in integers: what the exact search and its bounds compute with, so that no two ranks can round differently.

Between two *cuts* (the boundaries at which the layers may be cut) lies an *item*: a layer, or a run of layers that must
stay together. Load is counted in units of about 2**-60 of all layers; time is load over speed, in the same unit for a
stage of speed 1, rounded up to whole units. Used by `partition`, `interleaved` and `refine`. It must not know how splits
are searched for.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megatron_dyn.plan.problem import SplitProblem

IntArray = npt.NDArray[np.int64]

_UNIT_BITS = 60
"""All loads together are about 2**60 units: exact for layers down to 1/128 of the total, and sums fit in int64."""
_TIE = 10**12
"""Splits whose slowest stage is within one part in this many of the best count as equally fast."""


@dataclass(frozen=True, slots=True)
class Rate:
    """Time per load of a stage: an exact fraction, rounded up once per stage, so that comparisons are of integers."""

    numerator: int
    denominator: int

    def time(self, load: int) -> int:
        """Time that `load` takes."""
        return -(-load * self.numerator // self.denominator)

    def load_within(self, time: int) -> int:
        """The largest load that takes at most `time`."""
        return time * self.denominator // self.numerator


@dataclass(frozen=True, kw_only=True, eq=False)
class Tables:
    """The tables of one problem. Loads in units, sums below 2**61; a split is the cut behind each chunk, by index."""

    cuts: IntArray
    """[items + 1]: layers before each cut; first 0, last all."""
    prefix: tuple[int, ...]
    """[items + 1]: load of the layers before each cut."""
    fixed: tuple[int, ...]
    """By pp_rank: load that is there whatever the split."""
    rates: tuple[Rate, ...]
    """By pp_rank."""
    least: tuple[int, ...]
    """By chunk: the fewest items."""
    needed: IntArray | None
    """[chunks, items + 1]: bytes that the items before each cut would add to each chunk; None: no cap."""
    fixed_bytes: tuple[int, ...]
    """By pp_rank: bytes that are there whatever the split."""
    cap_bytes: int
    """The most bytes of a stage."""
    old: tuple[int, ...]
    """[chunks + 1]: layers before each boundary now; all 0 when there is nothing to move from."""
    homes: IntArray | None
    """By layer: the pp_rank that holds it now; None when there is nothing to move from."""
    weights: IntArray
    """By layer: what counts when it moves."""
    unit_exponent: int
    """A unit of time is 2 to this power, in seconds."""

    @property
    def num_stages(self) -> int:
        """All pp_ranks, those that hold no chunk too."""
        return len(self.fixed)

    @property
    def num_items(self) -> int:
        """Items between the cuts."""
        return len(self.prefix) - 1

    @property
    def num_chunks(self) -> int:
        """Chunks that may hold items."""
        return len(self.least)

    @cached_property
    def items(self) -> list[int]:
        """Load of each item."""
        return [end - start for start, end in pairwise(self.prefix)]

    @cached_property
    def item_bytes(self) -> list[list[int]] | None:
        """By chunk and item: bytes that the item adds to the chunk; None: no cap."""
        return None if self.needed is None else np.diff(self.needed).tolist()

    def held(self, pp_rank: int) -> IntArray:
        """[items + 1]: weight of the layers before each cut that `pp_rank` holds now."""
        if self.homes is None:
            return np.zeros(len(self.cuts), dtype=np.int64)
        return prefix_sums(np.where(self.homes == pp_rank, self.weights, 0))[self.cuts]

    def counts(self, ends: Sequence[int]) -> tuple[int, ...]:
        """Layers per chunk of the split whose chunks end at these cuts."""
        return tuple(int(self.cuts[end] - self.cuts[start]) for start, end in pairwise((0, *ends)))

    def ends(self, counts: Sequence[int]) -> tuple[int, ...] | None:
        """The cuts behind each chunk of the split with these layers per chunk; None when it cuts where it must not."""
        boundaries = np.cumsum(counts)
        ends = self.cuts.searchsorted(boundaries)
        return tuple(ends.tolist()) if np.array_equal(self.cuts[ends], boundaries) else None

    def loads(self, ends: Sequence[int]) -> list[int]:
        """Load by pp_rank."""
        loads = list(self.fixed)
        for chunk, (start, end) in enumerate(pairwise((0, *ends))):
            loads[chunk % self.num_stages] += self.prefix[end] - self.prefix[start]
        return loads

    def bytes_held(self, ends: Sequence[int]) -> list[int]:
        """Bytes by pp_rank; zeros without a cap."""
        held = list(self.fixed_bytes)
        if self.needed is not None:
            for chunk, (start, end) in enumerate(pairwise((0, *ends))):
                held[chunk % self.num_stages] += int(self.needed[chunk, end] - self.needed[chunk, start])
        return held

    def moved(self, ends: Sequence[int]) -> int:
        """Weight of the layers that change their stage."""
        if self.homes is None:
            return 0
        new = np.repeat(np.arange(self.num_chunks) % self.num_stages, self.counts(ends))
        return int(self.weights[new != self.homes].sum())

    def peak(self, ends: Sequence[int]) -> int:
        """Time of the slowest stage."""
        return max(rate.time(load) for rate, load in zip(self.rates, self.loads(ends), strict=True))

    def allows(self, ends: Sequence[int], bound: int) -> bool:
        """Whether the split has enough items in each chunk and no stage above the time `bound` or the cap."""
        if any(end - start < least for (start, end), least in zip(pairwise((0, *ends)), self.least, strict=True)):
            return False
        if self.needed is not None and max(self.bytes_held(ends)[: self.num_chunks]) > self.cap_bytes:
            return False
        return self.peak(ends) <= bound

    def longest(self) -> int:
        """A time within which any split is."""
        return max(rate.time(self.prefix[-1] + load) for rate, load in zip(self.rates, self.fixed, strict=True))

    def seconds(self, time: int) -> float:
        """`time` in seconds."""
        return math.ldexp(time, self.unit_exponent)

    def time_within(self, seconds: float) -> int:
        """The longest time of at most `seconds`."""
        return int(Fraction(seconds) / Fraction(2) ** self.unit_exponent)


def with_ties(time: int) -> int:
    """The longest time that counts as equal to `time`."""
    return time + time // _TIE


def prefix_sums(values: Sequence[int] | IntArray) -> IntArray:
    """[n + 1]: sum of the values before each position."""
    sums = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(np.asarray(values, dtype=np.int64), out=sums[1:])
    return sums


def tables_of(problem: SplitProblem) -> Tables:
    """The problem in integers. Units are powers of two, so scaling all times by one changes nothing but the unit."""
    extras = problem.stage_seconds or ()
    ends = (problem.first_seconds, problem.last_seconds)
    shift = _UNIT_BITS - math.frexp(math.fsum((*problem.layer_seconds, *ends, *extras)))[1]
    *layers, first, last = (round(math.ldexp(value, shift)) for value in (*problem.layer_seconds, *ends))
    num_stages, num_runs = problem.num_stages, problem.num_runs
    fixed = [round(math.ldexp(value, shift)) for value in extras] or [0] * num_stages
    fixed[0] += first
    fixed[(num_runs - 1) % num_stages] += last
    rates, exponent = _rates(problem.speeds, num_stages)
    cuts = legal_cuts(problem)
    memory = problem.memory
    return Tables(
        cuts=cuts,
        prefix=tuple(prefix_sums(layers)[cuts].tolist()),
        fixed=tuple(fixed),
        rates=rates,
        least=_least(problem),
        needed=None if memory is None else memory.needed_bytes()[:, cuts],
        fixed_bytes=_fixed_bytes(problem),
        cap_bytes=0 if memory is None else min(memory.cap_bytes, 2**61),
        old=tuple(accumulate(problem.current or (0,) * num_runs, initial=0)),
        homes=None if problem.current is None else np.array(problem.stage_of(problem.current), dtype=np.int64),
        weights=np.array(problem.weights, dtype=np.int64),
        unit_exponent=-shift - exponent,
    )


def legal_cuts(problem: SplitProblem) -> IntArray:
    """[items + 1]: layers before each boundary at which the layers may be cut; first 0, last all."""
    num_layers = len(problem.layer_seconds)
    legal = np.ones(num_layers + 1, dtype=bool)
    legal[list(problem.uncut)] = False
    legal[1 : max(problem.pinned_first, 1)] = False
    legal[num_layers - max(problem.pinned_last, 1) + 1 : num_layers] = False
    return np.flatnonzero(legal)


def _least(problem: SplitProblem) -> tuple[int, ...]:
    """What is pinned is one item, the first or the last, so that its chunk has to hold an item."""
    least = [problem.min_layers] * problem.num_runs
    least[0] = max(least[0], int(problem.pinned_first > 0))
    least[-1] = max(least[-1], int(problem.pinned_last > 0))
    return tuple(least)


def _rates(speeds: tuple[float, ...] | None, num_stages: int) -> tuple[tuple[Rate, ...], int]:
    """Rates by pp_rank and the power of two that the speeds were divided by.

    The fastest stage gets a speed in [1, 2): rounding times up to whole units then costs nothing that could matter.
    """
    exponent = math.frexp(max(speeds or (1.0,)))[1] - 1
    fractions = (Fraction(speed) / Fraction(2) ** exponent for speed in speeds or (1.0,) * num_stages)
    return tuple(Rate(speed.denominator, speed.numerator) for speed in fractions), exponent


def _fixed_bytes(problem: SplitProblem) -> tuple[int, ...]:
    memory, num_stages = problem.memory, problem.num_stages
    if memory is None:
        return (0,) * num_stages
    held = list(memory.rank_bytes or (0,) * num_stages)
    for chunk in range(problem.num_runs):
        held[chunk % num_stages] += memory.fixed_bytes(chunk)
    return tuple(held)
