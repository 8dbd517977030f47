"""Flat ranges of sharded optimizer state: who holds what, who will hold what, and so what has to travel. Pure, no torch.

With a distributed optimizer a rank holds a flat piece of each parameter's main copy and moments. The borders of the pieces
depend on all the parameters of a stage, so a move of one layer shifts those of layers that stay. Every rank plans alike from
what all ranks tell; only ranges whose owner changes are in the plan.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


class RangeError(RuntimeError):
    """Shards that do not add up; the message names the parameter, the elements expected and those that are there."""


@dataclass(frozen=True, slots=True, order=True)
class ShardKey:
    """Names one parameter whose optimizer state is spread over ranks."""

    unit: str
    """What it is part of: `layer 3`, or `stage 0 chunk 1` for what never moves."""
    name: str
    """Name within the unit."""
    coordinate: str
    """Tells apart the parallel copies and slices of the parameter that have a state of their own, for example `tp 1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardNote:
    """What a rank tells of one shard that it holds. Small and picklable."""

    start: int
    """First element of the flat parameter that the shard holds."""
    end: int
    """One past the last."""
    kinds: tuple[tuple[str, str], ...]
    """(kind, dtype) of each tensor of the shard, all of `end - start` elements: `main`, `optimizer:<state name>`."""
    facts: Any = None
    """What else the new owner has to know, opaque here: the optimizer's group, step counts. Equal on all holders."""


@dataclass(frozen=True, slots=True, order=True)
class RangeMove:
    """Elements `start` to `end` of the shard tensors of `key` leave global rank `source` for `destination`."""

    source: int
    destination: int
    key: ShardKey
    start: int
    end: int


Ranges = Mapping[ShardKey, tuple[int, int]]
"""(start, end) by parameter, on one rank."""


def plan_ranges(held: Sequence[Ranges], wanted: Sequence[Ranges]) -> tuple[RangeMove, ...]:
    """What travels so that every rank gets from what it holds to what it wants; both by global rank.

    The order is the same on all ranks. Raises RangeError when a wanted element is held by no rank, or by two.
    """
    holders: dict[ShardKey, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, ranges in enumerate(held):
        for key, (start, end) in ranges.items():
            holders[key].append((start, end, rank))
    for pieces in holders.values():
        pieces.sort()
    return tuple(
        sorted(
            RangeMove(source=source, destination=destination, key=key, start=start, end=end)
            for destination, ranges in enumerate(wanted)
            for key, borders in ranges.items()
            for start, end, source in _covering(key, borders, holders.get(key, []))
            if source != destination
        )
    )


def _covering(
    key: ShardKey, wanted: tuple[int, int], holders: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int]]:
    """(start, end, rank) of the parts of a wanted range, in order. `holders` by ascending start."""
    reached, end = wanted
    for first, last, rank in holders:
        low, high = max(first, wanted[0]), min(last, end)
        if low >= high:
            continue
        if low != reached:
            raise RangeError(f"{_told(key)}: expected one holder of elements {reached} to {high}, got {low} to {high}")
        yield low, high, rank
        reached = high
    if reached != end:
        raise RangeError(f"{_told(key)}: elements {reached} to {end} are held by no rank")


def _told(key: ShardKey) -> str:
    return f"optimizer state of {key.unit} {key.name} ({key.coordinate})"
