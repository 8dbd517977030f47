"""One stage of the diffusion: it knows its own items, talks to its two neighbours, and knows by itself when all are done.

`diffusion` runs all stages of a job in one process, in lock-step; `diffuse_stage` is one stage by itself, over any Link.
Both use the same Stage, so both end at the same split. It must not know seconds or layouts, and all numbers are whole.

Phases alternate: in phase 1 stages 0-1, 2-3, ... are pairs, in phase 2 stages 1-2, 3-4, ..., and so on. A pair tells each
other all that they hold, and both work out which run of layers at their common boundary crosses it: the one after which
the slower of the two is fastest, the shortest among equals, and only when that is faster than before. So the times of all
stages, sorted from the slowest, fall in lexicographic order with every move, and there are finitely many splits: it ends.
With equal speeds the variance of the loads falls with every move as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_dyn.plan.rivals.items import Item, Room


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a stage tells its partner of a phase."""

    room: Room
    items: tuple[Item, ...]
    """In layer order."""
    quiet_phases: int
    """See Stage."""


class Link(Protocol):
    """The way to one neighbour."""

    def exchange(self, offer: Offer) -> Offer:
        """Send `offer` and return the neighbour's of the same phase; blocks, and raises where the neighbour is gone."""
        ...


class Stage:
    """What one stage holds during the diffusion.

    `quiet_phases` is how long, as far as news has come, no stage has moved anything: 0 after a move of its own, else one
    more than the lower of both partners'. News of a move reaches the furthest of `p` stages after `p - 2` phases, so at
    `p` there have been an odd and an even phase in which nobody moved, and nobody ever will again. The news of the last
    move has then reached everyone, so all stages see this in the same phase.
    """

    def __init__(self, room: Room, items: Sequence[Item], *, num_stages: int) -> None:
        """Raises ValueError when the stage starts with fewer items than it must hold."""
        if len(items) < room.min_items:
            raise ValueError(f"Stage: expected at least {room.min_items} items to start with, got {len(items)}")
        self.room, self.items = room, list(items)
        self.quiet_phases = 0
        self._num_stages = num_stages

    @property
    def is_done(self) -> bool:
        """Whether nothing can move any more on any stage."""
        return self._num_stages == 1 or self.quiet_phases >= self._num_stages

    @property
    def fits(self) -> bool:
        """Whether the stage is within its cap; a start above it may not come down."""
        return self.room.takes(sum(item.bytes_on(self.room.in_flight) for item in self.items))

    def offer(self) -> Offer:
        """What the partner has to know."""
        return Offer(room=self.room, items=tuple(self.items), quiet_phases=self.quiet_phases)

    def rest(self) -> None:
        """A phase without a partner."""
        self.quiet_phases += 1

    def meet_right(self, other: Offer) -> int:
        """Settle a phase with the stage behind; returns how many items went there (below 0: came from there)."""
        crossing = items_to_right(self.offer(), other)
        if crossing > 0:
            del self.items[len(self.items) - crossing :]
        elif crossing < 0:
            self.items += other.items[:-crossing]
        self._note(crossing, other)
        return crossing

    def meet_left(self, other: Offer) -> int:
        """Settle a phase with the stage in front; returns how many items came from there (below 0: went there)."""
        crossing = items_to_right(other, self.offer())
        if crossing > 0:
            self.items[:0] = other.items[-crossing:]
        elif crossing < 0:
            del self.items[:-crossing]
        self._note(crossing, other)
        return crossing

    def _note(self, crossing: int, other: Offer) -> None:
        self.quiet_phases = 0 if crossing else 1 + min(self.quiet_phases, other.quiet_phases)


def items_to_right(left: Offer, right: Offer) -> int:
    """How many items cross from `left` to `right` (below 0: from right to left); both partners call this alike."""
    left_load, right_load = _load(left), _load(right)
    # Times compared without a division: load over speed, both multiplied with both speeds.
    if left_load * right.room.speed > right_load * left.room.speed:
        return _items_given(left, right, list(reversed(left.items)))
    return -_items_given(right, left, list(right.items))


def is_left_of_pair(stage: int, phase: int) -> bool:
    """Whether `stage` is the left one of its pair in `phase`, counted from 1."""
    return stage % 2 == (phase + 1) % 2


def diffuse_stage(stage: Stage, *, position: int, left: Link | None, right: Link | None) -> int:
    """Run one stage to the end over its links; returns the number of phases, which is the same on all stages.

    Every stage must call it, with its `position` from 0 and None for the link that it does not have. `stage.items` is then
    what it holds. Raises what a link raises.
    """
    phase = 0
    while not stage.is_done:
        phase += 1
        on_the_left = is_left_of_pair(position, phase)
        link = right if on_the_left else left
        if link is None:
            stage.rest()
        elif on_the_left:
            stage.meet_right(link.exchange(stage.offer()))
        else:
            stage.meet_left(link.exchange(stage.offer()))
    return phase


def _load(offer: Offer) -> int:
    return offer.room.load + sum(item.load for item in offer.items)


def _items_given(giver: Offer, taker: Offer, items: Sequence[Item]) -> int:
    """How many of the giver's `items`, in the order in which they may leave, make the slower of both fastest."""
    give_load, take_load = _load(giver), _load(taker)
    best = max(give_load * taker.room.speed, take_load * giver.room.speed)
    num_best, num_bytes = 0, sum(item.bytes_on(taker.room.in_flight) for item in taker.items)
    for number, item in enumerate(items[: len(items) - giver.room.min_items], start=1):
        give_load, take_load = give_load - item.load, take_load + item.load
        num_bytes += item.bytes_on(taker.room.in_flight)
        taken = take_load * giver.room.speed
        if taken >= best or not taker.room.takes(num_bytes):
            break
        slower = max(give_load * taker.room.speed, taken)
        if slower < best:
            best, num_best = slower, number
    return num_best
