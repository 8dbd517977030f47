"""Every split, looked at in order, with the branches cut off that cannot lead anywhere.

A tree of boundaries: the root has none, a leaf has all. It is seen to its end or given up after a number of steps; steps
are counted, not timed, so every rank sees the same. Used by `interleaved` where splits are few, and by `refine`, which
wants all splits within a bound. It must not know seconds or layouts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from megatron_dyn.plan.exact.tables import IntArray, Tables, prefix_sums

_Ends = tuple[int, ...]


class OutOfSteps(RuntimeError):
    """The tree was not seen to its end."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Branch:
    """Where in the tree the search is: the boundaries so far, and what they put on each stage."""

    ends: list[int]
    loads: list[int]
    bytes_held: list[int]
    slack: int
    """Load that may still go unused on the stages in sum: what they could hold less what there is."""
    limits: list[int] = field(default_factory=list)
    """Most load by pp_rank."""

    @property
    def key(self) -> tuple[int, ...]:
        """All that what follows depends on."""
        return (len(self.ends), self.ends[-1], *self.loads, *self.bytes_held)


class Tree:
    """The splits of one problem. Its methods raise OutOfSteps once they tried `max_steps` branches, all calls together."""

    def __init__(self, tables: Tables, *, max_steps: int) -> None:
        """Nothing is looked at yet."""
        self._tables = tables
        self._steps_left = max_steps
        self._highest = [tables.num_items - sum(tables.least[chunk + 1 :]) for chunk in range(tables.num_chunks)]
        self._step = gcd(*tables.items) or 1
        self._hopeless: set[tuple[int, ...]] = set()

    def any_within(self, bound: int) -> _Ends | None:
        """The cuts behind each chunk of a split with no stage above the time `bound` or the cap; None: there is none.

        To be called with ever lower bounds: what led nowhere under one is not looked at again under the next.
        """
        branch = self._root(bound)
        if branch is None:
            return None

        def note(branch: _Branch) -> None:
            self._hopeless.add(branch.key)

        order, is_cut = self._most_even(branch), lambda branch: branch.key in self._hopeless
        # The search stops at the first leaf, so only branches that were seen to their end are noted.
        return next(self._leaves(branch, order, is_cut, note), None)

    def all_within(self, bound: int) -> Iterator[_Ends]:
        """Every split within the time `bound` and the cap, in the order of its boundaries."""
        branch = self._root(bound)
        if branch is not None:
            yield from self._leaves(branch, lambda chunk, low, high: range(low, high + 1), lambda branch: False)

    def closest_within(self, bound: int) -> _Ends | None:
        """The split within `bound` and the cap that moves the least, or without a current one fills no stage too much.

        Ties as those of `best_split`, in full. None when there is none.
        """
        branch = self._root(bound)
        if branch is None:
            return None
        cost_of = self._moved(branch.limits) if self._tables.homes is not None else lambda branch: max(branch.bytes_held)
        best: tuple[int, _Ends] | None = None
        seen: dict[tuple[int, ...], int] = {}

        def is_worse(branch: _Branch) -> bool:
            cost = cost_of(branch)
            if (best is not None and cost >= best[0]) or seen.get(branch.key, cost + 1) <= cost:
                return True
            seen[branch.key] = cost
            return False

        for ends in self._leaves(branch, self._nearest, is_worse):
            best = (cost_of(branch), ends)
        return None if best is None else best[1]

    def _root(self, bound: int) -> _Branch | None:
        """The empty branch; None when a stage exceeds the bound or the cap without any item."""
        tables = self._tables
        rooms = [rate.load_within(bound) - load for rate, load in zip(tables.rates, tables.fixed, strict=True)]
        num_used = min(tables.num_stages, tables.num_chunks)
        if min(rooms) < 0 or (tables.needed is not None and max(tables.fixed_bytes[:num_used]) > tables.cap_bytes):
            return None
        # All items are multiples of one load: what is left of a room beyond such a multiple cannot be used.
        rooms = [room // self._step * self._step for room in rooms]
        return _Branch(
            ends=[0],
            loads=list(tables.fixed),
            bytes_held=list(tables.fixed_bytes),
            slack=sum(rooms[:num_used]) - tables.prefix[-1],
            limits=[load + room for load, room in zip(tables.fixed, rooms, strict=True)],
        )

    def _leaves(
        self,
        branch: _Branch,
        order: Callable[[int, int, int], Iterator[int] | range | list[int]],
        is_cut: Callable[[_Branch], bool],
        note: Callable[[_Branch], None] = lambda branch: None,
    ) -> Iterator[_Ends]:
        """Leaves below `branch`, which is at the leaf whenever one is given, and as before at the end.

        `order(chunk, first, last)` are the ends to try for a chunk, `is_cut` says which branches to leave out, and
        `note` is told of those that were seen to their end.
        """
        chunk, tables = len(branch.ends) - 1, self._tables
        if branch.slack < 0:
            return
        if chunk == tables.num_chunks:
            yield tuple(branch.ends[1:])
            return
        stage, start = chunk % tables.num_stages, branch.ends[-1]
        room = branch.limits[stage] - branch.loads[stage]
        is_last = chunk + tables.num_stages >= tables.num_chunks
        low, high = self._reach(branch, chunk, room if is_last else None)
        for end in order(chunk, low, high):
            if self._steps_left <= 0:
                raise OutOfSteps
            self._steps_left -= 1
            load, held = tables.prefix[end] - tables.prefix[start], self._bytes(chunk, start, end)
            lost = room - load if is_last else 0
            branch.ends.append(end)
            branch.loads[stage] += load
            branch.bytes_held[stage] += held
            branch.slack -= lost
            if not is_cut(branch):
                yield from self._leaves(branch, order, is_cut, note)
                note(branch)
            branch.ends.pop()
            branch.loads[stage] -= load
            branch.bytes_held[stage] -= held
            branch.slack += lost

    def _reach(self, branch: _Branch, chunk: int, room: int | None) -> tuple[int, int]:
        """First and last end of `chunk`; `room` is what its stage can hold no more after it, None when it has others."""
        tables, start, stage = self._tables, branch.ends[-1], chunk % self._tables.num_stages
        prefix = tables.prefix
        low = start + tables.least[chunk]
        high = bisect_right(prefix, prefix[start] + branch.limits[stage] - branch.loads[stage], start) - 1
        if tables.needed is not None:
            row = tables.needed[chunk]
            left = tables.cap_bytes - branch.bytes_held[stage]
            high = min(high, int(row.searchsorted(row[start] + left, side="right")) - 1)
        if room is not None:
            low = max(low, bisect_left(prefix, prefix[start] + room - branch.slack, start))
        if chunk == tables.num_chunks - 1:
            low = tables.num_items
        return low, min(high, self._highest[chunk])

    def _bytes(self, chunk: int, start: int, end: int) -> int:
        needed = self._tables.needed
        return 0 if needed is None else int(needed[chunk, end] - needed[chunk, start])

    def _most_even(self, branch: _Branch) -> Callable[[int, int, int], list[int]]:
        """Ends in the order of how near they are to an even use of what the stage has left."""
        tables = self._tables

        def order(chunk: int, low: int, high: int) -> list[int]:
            stage = chunk % tables.num_stages
            num_left = len(range(chunk, tables.num_chunks, tables.num_stages))
            target = tables.prefix[branch.ends[-1]] + (branch.limits[stage] - branch.loads[stage]) // num_left
            return sorted(range(low, high + 1), key=lambda end: (abs(tables.prefix[end] - target), end))

        return order

    def _nearest(self, chunk: int, low: int, high: int) -> list[int]:
        """Ends in the order of how near they are to the boundary now."""
        cuts, old = self._tables.cuts, self._tables.old[chunk + 1]
        return sorted(range(low, high + 1), key=lambda end: (abs(int(cuts[end]) - old), end))

    def _moved(self, limits: list[int]) -> Callable[[_Branch], int]:
        """For a branch, the least weight that a split below it moves if the loads of the chunks to come do not add up."""
        tables, last = self._tables, self._tables.num_items
        total = prefix_sums(tables.weights)[tables.cuts]
        leaving = [total - tables.held(stage) for stage in range(tables.num_stages)]
        rest: list[IntArray] = [np.where(np.arange(last + 1) == last, 0, 2**61)]
        for chunk in reversed(range(tables.num_chunks)):
            stage = chunk % tables.num_stages
            behind = rest[-1] + leaving[stage]
            row = np.full(last + 1, 2**61, dtype=np.int64)
            for start in range(last + 1):
                high = bisect_right(tables.prefix, tables.prefix[start] + limits[stage] - tables.fixed[stage], start) - 1
                window = behind[start + tables.least[chunk] : high + 1]
                if len(window):
                    row[start] = min(2**61, int(window.min()) - int(leaving[stage][start]))
            rest.append(row)
        rest.reverse()

        def cost(branch: _Branch) -> int:
            runs = zip(branch.ends, branch.ends[1:], strict=False)
            moved = sum(
                int(leaving[chunk % tables.num_stages][end] - leaving[chunk % tables.num_stages][start])
                for chunk, (start, end) in enumerate(runs)
            )
            return moved + int(rest[len(branch.ends) - 1][branch.ends[-1]])

        return cost
