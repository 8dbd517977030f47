"""A split over virtual stages that is bettered by shifting boundaries: the local search behind `interleaved`.

Two ways to better it. A *chain* relieves one stage: an item goes to a neighbouring chunk, and when that makes its stage
too slow or too full, an item of that stage goes on, and so on. A *window* is one chunk of every stage in a row: with
the other chunks left as they are, its best split is found exactly by a Sweep. All of it is counted, never timed, so
every rank does the same. It must not know seconds or layouts.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from random import Random

from megatron_dyn.plan.exact.closest import closest_counts
from megatron_dyn.plan.exact.sweep import ByteTable, Sweep
from megatron_dyn.plan.exact.tables import IntArray, Tables

_CHAIN = 4
"""Shifts in a chain: a pair and then some; every further one multiplies the work by twice the chunks of a stage."""
_SHAKEN = 6
"""Shifts of a shake: enough to get away, few enough to keep most of what was good."""


class Shifts:
    """A split under change. It may start above the memory cap: `repair` comes before all else."""

    def __init__(self, tables: Tables, ends: Sequence[int], *, max_steps: int) -> None:
        """`ends` are the cuts behind each chunk; every chunk must hold its fewest items. `max_steps` bounds the work."""
        self._tables = tables
        self._ends = [0, *ends]
        self._steps_left = max_steps
        self._loads = tables.loads(ends)
        self._bytes = tables.bytes_held(ends)
        self._rows: dict[int, IntArray] = {}

    @property
    def ends(self) -> tuple[int, ...]:
        """The cuts behind each chunk."""
        return tuple(self._ends[1:])

    @property
    def peak(self) -> int:
        """Time of the slowest stage."""
        return max(self._times())

    @property
    def peak_bytes(self) -> int:
        """Bytes of the fullest stage; 0 without a cap."""
        return max(self._bytes)

    @property
    def steps_left(self) -> int:
        """What is left of the work."""
        return max(0, self._steps_left)

    def repair(self) -> bool:
        """Bring every stage under the memory cap, whatever the time; False when no way was found."""
        if self._tables.needed is None:
            return True
        self._lighten([self._tables.prefix[-1] + load for load in self._tables.fixed], self._tables.cap_bytes)
        return self.peak_bytes <= self._tables.cap_bytes

    def shake(self, random: Random) -> None:
        """Shift some boundaries whatever that does, to leave a split that no chain can better."""
        for _ in range(_SHAKEN):
            offers = self._offers(random.randrange(self._tables.num_stages))
            if offers:
                self._shift(*offers[random.randrange(len(offers))])

    def hasten(self, floor: int) -> None:
        """Make the slowest stage faster for as long as that works and it is slower than `floor`."""
        while self.peak > floor:
            if not self._relieve_slowest() and not any(self._hasten_window(first) for first in self._windows()):
                return

    def slow_to(self, bound: int) -> bool:
        """Bring every stage within `bound` by as few chains as it takes; False when no way was found."""
        while self.peak > bound:
            # At once where that can be done: every chain on the way moves layers that might have stayed.
            if not self._relieve_slowest(bound) and not self._relieve_slowest():
                return False
        return True

    def lighten(self, bound: int) -> None:
        """Lower the bytes of the fullest stage for as long as that works, within the time `bound`."""
        if self._tables.needed is not None:
            self._lighten([rate.load_within(bound) for rate in self._tables.rates], 0)

    def settle(self, bound: int) -> None:
        """Window by window, move fewer bytes within the time `bound`, until no window can do better."""
        better = self._tables.homes is not None
        while better:
            before = self._tables.moved(self.ends)
            for first in self._windows():
                start, end = self._span(first)
                counts = closest_counts(
                    self._window(first),
                    bound=bound,
                    held=partial(self._held, first, start, end),
                    places=self._tables.cuts[start : end + 1],
                    old=self._tables.old[first : first + self._tables.num_stages + 1],
                )
                self._put(first, counts)
            better = self._tables.moved(self.ends) < before

    def _times(self) -> list[int]:
        return [rate.time(load) for rate, load in zip(self._tables.rates, self._loads, strict=True)]

    def _lighten(self, loads: Sequence[int], least_bytes: int) -> None:
        """Take bytes off the fullest stage while it has more than `least_bytes`, within these loads by pp_rank."""
        is_lighter = True
        while is_lighter and self.peak_bytes > least_bytes:
            stage = self._bytes.index(self.peak_bytes)
            limits = [max(self.peak_bytes - 1, held) for held in self._bytes]
            limits[stage] = self.peak_bytes - 1
            is_lighter = self._relieve({stage}, loads, limits, _CHAIN)

    def _relieve_slowest(self, bound: int | None = None) -> bool:
        """Take the slowest stage below its time, or within `bound`, and leave no other slower than that or than it was."""
        times = self._times()
        stage = times.index(max(times))
        bound = times[stage] - 1 if bound is None else bound
        limits = [max(rate.load_within(bound), load) for rate, load in zip(self._tables.rates, self._loads, strict=True)]
        limits[stage] = self._tables.rates[stage].load_within(bound)
        return self._relieve({stage}, limits, [max(self._tables.cap_bytes, held) for held in self._bytes], _CHAIN)

    def _relieve(self, over: set[int], loads: Sequence[int], bytes_held: Sequence[int], num_shifts: int) -> bool:
        """Bring the stages in `over` within the limits by at most `num_shifts` shifts; otherwise leave all as it was."""
        if not over:
            return True
        # A shift takes something off one stage only.
        if len(over) > num_shifts:
            return False
        for boundary, step in self._offers(min(over)):
            if self._steps_left <= 0:
                return False
            self._steps_left -= 1
            self._shift(boundary, step)
            left = set(over)
            for stage in ((boundary - 1) % len(loads), boundary % len(loads)):
                is_over = self._loads[stage] > loads[stage] or self._bytes[stage] > bytes_held[stage]
                left = left | {stage} if is_over else left - {stage}
            if self._relieve(left, loads, bytes_held, num_shifts - 1):
                return True
            self._shift(boundary, -step)
        return False

    def _offers(self, stage: int) -> list[tuple[int, int]]:
        """(boundary, step) of each shift that takes an item off `stage`: step 1 gives to the chunk before, -1 behind."""
        ends, least = self._ends, self._tables.least
        offers = []
        for chunk in range(stage, len(least), self._tables.num_stages):
            if ends[chunk + 1] - ends[chunk] > least[chunk]:
                offers += [(chunk, 1)] * (chunk > 0) + [(chunk + 1, -1)] * (chunk + 1 < len(least))
        return offers

    def _shift(self, boundary: int, step: int) -> None:
        """Move the boundary before chunk `boundary` by one item, and that item to the chunk on the other side."""
        num_stages, sizes = self._tables.num_stages, self._tables.item_bytes
        item = self._ends[boundary] - (step < 0)
        before, behind = (boundary - 1) % num_stages, boundary % num_stages
        load = step * self._tables.items[item]
        self._loads[before] += load
        self._loads[behind] -= load
        if sizes is not None:
            self._bytes[before] += step * sizes[boundary - 1][item]
            self._bytes[behind] -= step * sizes[boundary][item]
        self._ends[boundary] += step

    def _windows(self) -> range:
        """The first chunk of each window that is looked at: they overlap, so that every boundary is inside of some."""
        num_stages = self._tables.num_stages
        return range(0, self._tables.num_chunks - num_stages + 1, max(1, num_stages // 8))

    def _span(self, first: int) -> tuple[int, int]:
        return self._ends[first], self._ends[first + self._tables.num_stages]

    def _window(self, first: int) -> Sweep:
        """The walk over the chunks of one window, with all other chunks as they are."""
        tables = self._tables
        chunks = range(first, first + tables.num_stages)
        stages = [chunk % tables.num_stages for chunk in chunks]
        start, end = self._span(first)
        runs = list(pairwise(self._ends[first : first + tables.num_stages + 1]))
        memory = None
        if tables.needed is not None:
            rows = tables.needed[first : first + tables.num_stages]
            inside = [int(row[high] - row[low]) for row, (low, high) in zip(rows, runs, strict=True)]
            memory = ByteTable(
                needed=rows[:, start : end + 1],
                fixed=tuple(self._bytes[stage] - held for stage, held in zip(stages, inside, strict=True)),
                cap_bytes=tables.cap_bytes,
            )
        loads = [tables.prefix[high] - tables.prefix[low] for low, high in runs]
        return Sweep(
            prefix=tables.prefix[start : end + 1],
            fixed=[self._loads[stage] - load for stage, load in zip(stages, loads, strict=True)],
            rates=[tables.rates[stage] for stage in stages],
            least=tables.least[first : first + tables.num_stages],
            memory=memory,
        )

    def _hasten_window(self, first: int) -> bool:
        """Split one window anew if that makes the slowest stage faster."""
        if self._steps_left <= 0:
            return False
        self._steps_left -= self._tables.num_stages
        sweep = self._window(first)
        found = sweep.fastest(sweep.peak([0] * len(sweep.fixed)), self.peak - 1)
        if found is None:
            return False
        self._put(first, found[1])
        return True

    def _put(self, first: int, counts: Sequence[int]) -> None:
        """Give the chunks of one window other counts."""
        for chunk, count in enumerate(counts, start=first):
            self._ends[chunk + 1] = self._ends[chunk] + count
        self._loads = self._tables.loads(self.ends)
        self._bytes = self._tables.bytes_held(self.ends)

    def _held(self, first: int, start: int, end: int, place: int) -> IntArray:
        """Weight that is now on the stage of chunk `first + place` before each of the cuts `start..end`."""
        stage = (first + place) % self._tables.num_stages
        if stage not in self._rows:
            self._rows[stage] = self._tables.held(stage)
        return self._rows[stage][start : end + 1]
