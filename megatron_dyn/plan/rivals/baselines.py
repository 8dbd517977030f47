"""Splits to compare with: the paper's centralised search, and what Megatron's own flags give.

The centralised search is the "partition" balancer of DynMo (SC'25) as described, without the faults of its released code:
its epsilon is relative, no stage is left without a layer, ends and speeds count, and too few layers are refused. It must
not know layouts or schedules.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_dyn.plan.problem import Split, SplitProblem
from megatron_dyn.plan.rivals.answers import NotApplicable, check_no_virtual, check_places, simple_bound_seconds
from megatron_dyn.plan.rivals.items import ItemProblem, items_of, speed_units, units_to_seconds

_EPSILON = 1e-9
"""The search ends when what is left to gain is below this part of the bottleneck."""
_ONE = speed_units(1.0)


def partition(problem: SplitProblem) -> Split:
    """A binary search on the slowest stage with a greedy probe, by time.

    The probe fills stages from the front and leaves each stage behind its fewest layers: that is how none ends up empty.
    Within 1e-9 (relative) of the best when stages may be empty, or have one speed and no memory cap; else the probe can miss
    splits. Raises InfeasibleSplit for fewer layers than stages, NotApplicable for virtual stages and where the probe
    finds nothing under the memory cap.
    """
    return _partition(problem, "partition", by_parameters=False)


def partition_parameters(problem: SplitProblem) -> Split:
    """The same search on the parameters of the layers; raises NotApplicable also when those are not known."""
    return _partition(problem, "partition-parameters", by_parameters=True)


def megatron_uniform(problem: SplitProblem) -> Split:
    """As many layers on every chunk, as Megatron does without any flag; raises NotApplicable where they do not divide."""
    return _even(problem, name="megatron-uniform", extra_first=0, extra_last=0)


def megatron_account(problem: SplitProblem) -> Split:
    """Embedding and loss counted as a layer each, as with Megatron's two flags for that.

    Where only one of the two makes the layers divide, the heavier end counts, or the other. Raises NotApplicable where
    none does.
    """
    heavier = (0, 1) if problem.last_seconds >= problem.first_seconds else (1, 0)
    problems = []
    for first, last in ((1, 1), heavier, heavier[::-1]):
        try:
            return _even(problem, name="megatron-account", extra_first=first, extra_last=last)
        except NotApplicable as error:
            problems.append(str(error))
    raise NotApplicable(problems[0])


def _even(problem: SplitProblem, *, name: str, extra_first: int, extra_last: int) -> Split:
    num_chunks, num_stages = problem.num_runs, problem.num_stages
    if num_chunks % num_stages:
        raise NotApplicable(
            f"{name}: expected layers on all chunks of {num_stages} stages, got {num_chunks} chunks with layers"
        )
    counted = len(problem.layer_seconds) + extra_first + extra_last
    if counted % num_chunks:
        ends = "".join(end for end, extra in ((" plus the embedding", extra_first), (" plus the loss", extra_last)) if extra)
        raise NotApplicable(f"{name}: expected layers{ends} that divide by {num_chunks} chunks, got {counted}")
    counts = [counted // num_chunks] * num_chunks
    counts[0] -= extra_first
    counts[-1] -= extra_last
    if min(counts) < 0:
        raise NotApplicable(
            f"{name}: expected at least one layer for each end, got {counted // num_chunks} on a chunk with both"
        )
    check_places(problem, counts, name)
    return problem.split(counts, bound_seconds=simple_bound_seconds(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probe:
    """Tables for the greedy probe: whole numbers, so that a bound is either met or not."""

    items: ItemProblem
    loads: list[int]
    """[items + 1]: load before each boundary."""
    sizes: list[list[int]]
    """By distinct number of micro-batches in flight, [items + 1]: bytes before each boundary; empty without a cap."""
    size_of: list[int]
    """By stage: which of `sizes`."""

    def fill(self, bound: int) -> tuple[int, ...] | None:
        """Items by stage with no stage slower than `bound` (in load units at speed 1); None where the probe fails."""
        rooms, num_items = self.items.rooms, len(self.loads) - 1
        needed_behind = sum(room.min_items for room in rooms)
        counts, start = [], 0
        for stage, room in enumerate(rooms):
            needed_behind -= room.min_items
            end = bisect_right(self.loads, self.loads[start] + bound * room.speed // _ONE - room.load, lo=start) - 1
            if room.cap_bytes is not None:
                sizes = self.sizes[self.size_of[stage]]
                end = min(end, bisect_right(sizes, sizes[start] + room.cap_bytes - room.held_bytes, lo=start) - 1)
            end = min(end, num_items - needed_behind)
            if end < start + room.min_items:
                return None
            counts.append(end - start)
            start = end
        return tuple(counts) if start == num_items else None

    def peak(self, counts: Sequence[int]) -> int:
        """The smallest bound that these items by stage meet."""
        spans = pairwise(accumulate(counts, initial=0))
        return max(
            -(-(room.load + self.loads[end] - self.loads[start]) * _ONE // room.speed)
            for room, (start, end) in zip(self.items.rooms, spans, strict=True)
        )


def _probe_of(items: ItemProblem) -> _Probe:
    kinds = list(dict.fromkeys(room.in_flight for room in items.rooms))
    capped = items.rooms[0].cap_bytes is not None
    return _Probe(
        items=items,
        loads=list(accumulate((item.load for item in items.items), initial=0)),
        sizes=[list(accumulate((item.bytes_on(kind) for item in items.items), initial=0)) for kind in kinds] if capped else [],
        size_of=[kinds.index(room.in_flight) for room in items.rooms],
    )


def _partition(problem: SplitProblem, name: str, *, by_parameters: bool) -> Split:
    check_no_virtual(problem, name)
    items = items_of(problem, by_parameters=by_parameters)
    probe = _probe_of(items)
    fixed = sum(room.load for room in items.rooms)
    total_speed = sum(room.speed for room in items.rooms)
    low = (probe.loads[-1] + fixed) * _ONE // total_speed
    counts = probe.fill((probe.loads[-1] + fixed) * _ONE // min(room.speed for room in items.rooms) + 1)
    if counts is None:
        raise NotApplicable(f"{name}: its greedy probe finds no split under the memory cap (exact may)")
    high = probe.peak(counts)
    while high - low > _EPSILON * low:
        middle = (low + min(high, 2 * low)) // 2
        found = probe.fill(middle)
        if found is None:
            low = middle + 1
        else:
            counts, high = found, probe.peak(found)
    proves = not by_parameters and _probe_is_exact(problem, items)
    bound_seconds = units_to_seconds(low, _ONE) if proves else simple_bound_seconds(problem)
    return problem.split(items.layer_counts(counts), bound_seconds=bound_seconds)


def _probe_is_exact(problem: SplitProblem, items: ItemProblem) -> bool:
    """Whether a probe that fails proves that there is no split.

    It does where stages may be empty: reaching further never hurts. Where each must hold something, a stage may be too
    small for the one layer that it starts at; that cannot happen when all inner stages are alike and none is smaller than
    the last.
    """
    if problem.min_layers == 0:
        return True
    inner = items.rooms[1:-1]
    alike = len({room.speed for room in items.rooms}) == 1 and len({room.load for room in inner}) <= 1
    return problem.memory is None and alike and all(room.load <= items.rooms[-1].load for room in inner)
