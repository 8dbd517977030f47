"""A problem without virtual stages in whole numbers: runs of layers that cannot be parted, and what each stage has anyway.

Used by the algorithms that walk along the layers (`baselines`, `diffusion`). Loads are exact integers in a unit that
does not depend on the problem, so that stages that know only their own layers still compute alike. It must not know how
items are shared out.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megatron_dyn.plan.problem import InfeasibleSplit, SplitProblem
from megatron_dyn.plan.rivals.answers import NotApplicable

_LOAD_BITS = 100
"""A load is a multiple of 2**-100 (of a second, or of a parameter): exact for all floats above 4e-15."""
_SPEED_BITS = 60
"""A speed is a multiple of 2**-60: exact for all floats above 0.004."""


def load_units(value: float) -> int:
    """Seconds or parameters as a whole number; the same for the same float everywhere."""
    return int(math.ldexp(value, _LOAD_BITS))


def speed_units(speed: float) -> int:
    """A speed as a whole number, at least 1."""
    return max(1, int(math.ldexp(speed, _SPEED_BITS)))


def units_to_seconds(load: int, speed: int) -> float:
    """How long `load` takes at `speed`, both in units."""
    return math.ldexp(load / speed, _SPEED_BITS - _LOAD_BITS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A run of layers that stay together: one layer, or several that must not be cut apart."""

    load: int
    num_layers: int = 1
    state_bytes: int = 0
    activation_bytes: int = 0

    def bytes_on(self, in_flight: int) -> int:
        """Bytes on a stage that holds the activations of `in_flight` micro-batches."""
        return self.state_bytes + in_flight * self.activation_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A stage without items: what it has whatever they are, and what it may take."""

    load: int = 0
    """Ends and pinned layers."""
    speed: int = speed_units(1.0)
    pinned_layers: int = 0
    min_items: int = 1
    """The fewest items that it may hold."""
    in_flight: int = 1
    held_bytes: int = 0
    """Of ends and pinned layers."""
    cap_bytes: int | None = None
    """The most bytes with items; None: no cap."""

    def takes(self, num_bytes: int) -> bool:
        """Whether items of that many bytes together fit."""
        return self.cap_bytes is None or self.held_bytes + num_bytes <= self.cap_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemProblem:
    """The items in layer order, and the stages that share them."""

    items: tuple[Item, ...]
    rooms: tuple[Room, ...]

    def layer_counts(self, num_items: Sequence[int]) -> tuple[int, ...]:
        """Layers by stage when the stages hold so many items."""
        boundaries = pairwise(accumulate(num_items, initial=0))
        return tuple(
            room.pinned_layers + sum(item.num_layers for item in self.items[start:end])
            for room, (start, end) in zip(self.rooms, boundaries, strict=True)
        )

    def nearest_items(self, layer_counts: Sequence[int]) -> tuple[int, ...]:
        """Items by stage of the allowed split nearest to `layer_counts`: no item cut, no stage below its fewest."""
        edges = list(accumulate((item.num_layers for item in self.items), initial=self.rooms[0].pinned_layers))
        least = list(accumulate((room.min_items for room in self.rooms), initial=0))
        boundaries = [0]
        for stage, end in enumerate(accumulate(layer_counts[:-1]), start=1):
            wanted = min(bisect_left(edges, end), len(edges) - 1)
            if wanted and end - edges[wanted - 1] < edges[wanted] - end:
                wanted -= 1
            lowest = boundaries[-1] + self.rooms[stage - 1].min_items
            boundaries.append(min(max(wanted, lowest), len(self.items) - (least[-1] - least[stage])))
        return tuple(end - start for start, end in pairwise([*boundaries, len(self.items)]))


def items_of(problem: SplitProblem, *, by_parameters: bool) -> ItemProblem:
    """`problem` with loads from its seconds, or from its parameters (ends then weigh nothing: theirs are not known).

    Raises NotApplicable when parameters are asked for and not known, and InfeasibleSplit when no split gives every stage
    its fewest layers.
    """
    weights = problem.layer_parameters if by_parameters else problem.layer_seconds
    if weights is None:
        raise NotApplicable("expected the parameters of each layer, got none")
    first, last = _pins(problem)
    edges = [edge for edge in range(first, len(weights) - last) if edge == first or edge not in set(problem.uncut)]
    rooms = _rooms(problem, weights, pins=(first, last), by_parameters=by_parameters)
    items = tuple(_item(problem, weights, range(start, end)) for start, end in pairwise([*edges, len(weights) - last]))
    fewest = sum(room.min_items for room in rooms)
    if len(items) < fewest:
        raise InfeasibleSplit(
            f"expected at least {fewest} layers (or runs of layers that stay together) that are free to be placed, to leave "
            f"none of {problem.num_stages} stages empty, got {len(items)}"
        )
    return ItemProblem(items=items, rooms=rooms)


def _pins(problem: SplitProblem) -> tuple[int, int]:
    """Layers that stay on the first and on the last stage, with those that must not be cut off from them."""
    num_layers, uncut = len(problem.layer_seconds), set(problem.uncut)
    if problem.num_stages == 1:
        return 0, 0
    first, last = problem.pinned_first, problem.pinned_last
    while first and first in uncut:
        first += 1
    while last and num_layers - last in uncut:
        last += 1
    if first + last > num_layers:
        raise InfeasibleSplit(
            f"expected at most {num_layers} layers pinned to the first and last stage, got {first} and {last} "
            "(with those that must not be cut off from them)"
        )
    return first, last


def _item(problem: SplitProblem, weights: Sequence[float], layers: range) -> Item:
    memory = problem.memory
    return Item(
        load=sum(load_units(weights[layer]) for layer in layers),
        num_layers=len(layers),
        state_bytes=0 if memory is None else sum(memory.state_bytes[layer] for layer in layers),
        activation_bytes=0 if memory is None else sum(memory.activation_bytes[layer] for layer in layers),
    )


def _rooms(problem: SplitProblem, weights: Sequence[float], *, pins: tuple[int, int], by_parameters: bool) -> tuple[Room, ...]:
    num_stages, num_layers = problem.num_stages, len(weights)
    pinned = {0: range(pins[0]), num_stages - 1: range(num_layers - pins[1], num_layers)} if num_stages > 1 else {}
    loads = [0] * num_stages
    if not by_parameters:
        loads = [load_units(seconds) for seconds in problem.stage_seconds or (0.0,) * num_stages]
        loads[0] += load_units(problem.first_seconds)
        loads[-1] += load_units(problem.last_seconds)
    rooms = []
    for stage, load in enumerate(loads):
        here = _item(problem, weights, pinned.get(stage, range(0)))
        in_flight = 1 if problem.memory is None else problem.memory.in_flight[stage]
        rooms.append(
            Room(
                load=load + here.load,
                speed=speed_units(1.0 if problem.speeds is None else problem.speeds[stage]),
                pinned_layers=here.num_layers,
                min_items=max(0, problem.min_layers - here.num_layers),
                in_flight=in_flight,
                held_bytes=here.bytes_on(in_flight) + (0 if problem.memory is None else problem.memory.fixed_bytes(stage)),
                cap_bytes=None if problem.memory is None else problem.memory.cap_bytes,
            )
        )
    return tuple(rooms)
