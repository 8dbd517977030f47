"""Splits over virtual stages: every stage holds several chunks, and is as slow as all of them together.

What makes this hard is that the chunks of a stage are far apart in the order of the layers: no recurrence over the
boundaries sees a whole stage. So: a search from several starts, and where splits are few the whole tree; `partition`
turns seconds into the integer tables. It must not know seconds, layouts or schedules.
"""

from collections.abc import Sequence
from itertools import accumulate
from random import Random

from megatron_dyn.plan.exact.branch import OutOfSteps, Tree
from megatron_dyn.plan.exact.floors import packing_floor
from megatron_dyn.plan.exact.shifts import Shifts
from megatron_dyn.plan.exact.tables import Tables, with_ties
from megatron_dyn.plan.problem import InfeasibleSplit

_START_STEPS = 10_000
"""Shifts that the search may try from one start."""
_SHAKE_STEPS = 50_000
"""Shifts that it may try from shaken splits, together: about 0.2 s."""
_TREE_STEPS = 15_000
"""Branches that each question to the tree may try: about 0.2 s."""
_TREE_CHUNKS = 16
"""A tree of more chunks would hardly be seen to its end within these steps."""
_SETTLED = 2
"""Splits of equal speed whose moves are looked at window by window: the last step costs more than it finds."""
_TILTS = (0, 1, -1)
"""How the stages' room is spread over their chunks at a start: evenly, more in front, more behind."""


def interleaved_split(tables: Tables) -> tuple[tuple[int, ...], int]:
    """The cuts behind each chunk of the best split found, and a time that no split is below.

    The split has the fastest slowest stage found, then the least moved weight (without a current split: the fewest
    bytes on the fullest stage). The two are the best there is, and ties are broken as by `best_split`, where the tree
    was seen to its end. Pure and deterministic. Raises InfeasibleSplit when no split was found to meet the constraints.
    """
    floor = packing_floor(tables)
    found = _from_starts(tables, floor)
    ends, is_proved = _by_tree(tables, min(found, key=tables.peak, default=None), floor)
    if ends is None:
        raise InfeasibleSplit(_message(tables, is_proved=is_proved))
    found.append(ends)
    if not is_proved:
        found += _shaken(tables, ends, floor)
    bound = min(map(tables.peak, found))
    return _least_moved(tables, found, bound), bound if is_proved else floor


def _from_starts(tables: Tables, floor: int) -> list[tuple[int, ...]]:
    """What became of each start that could be brought under the cap."""
    found = []
    for start in dict.fromkeys(_starts(tables, floor)):
        shifts = Shifts(tables, start, max_steps=_START_STEPS)
        if shifts.repair():
            shifts.hasten(floor)
            found.append(shifts.ends)
    return found


def _shaken(tables: Tables, best: tuple[int, ...], floor: int) -> list[tuple[int, ...]]:
    """What became of the best when it was shaken, over and over."""
    # Seeded, and its numbers do not depend on the platform: all ranks shake alike.
    random, steps_left = Random(0), _SHAKE_STEPS
    found = []
    while steps_left > 0 and tables.peak(best) > floor:
        max_steps = min(steps_left, _START_STEPS)
        shifts = Shifts(tables, best, max_steps=max_steps)
        shifts.shake(random)
        if shifts.repair():
            shifts.hasten(floor)
            found.append(shifts.ends)
            best = min((shifts.ends, best), key=tables.peak)
        # One more, so that a split without a way on ends this, too.
        steps_left -= max_steps - shifts.steps_left + 1
    return found


def _starts(tables: Tables, floor: int) -> list[tuple[int, ...]]:
    """Splits to start from, the cuts behind each chunk: the one nearest to the current, then those of each tilt."""
    starts = []
    if tables.homes is not None:
        starts.append(_at(tables, tables.cuts.tolist(), tables.old[1:]))
    for tilt in _TILTS:
        rooms = _rooms(tables, floor, tilt)
        total = max(sum(rooms), 1)
        starts.append(_at(tables, tables.prefix, [done * tables.prefix[-1] // total for done in accumulate(rooms)]))
    return starts


def _rooms(tables: Tables, floor: int, tilt: int) -> list[int]:
    """Load by chunk if every stage filled its room at the time `floor`."""
    num_chunks, num_stages = tables.num_chunks, tables.num_stages
    num_rounds = -(-num_chunks // num_stages)
    parts = [2 * num_rounds + tilt * (num_rounds - 1 - 2 * (chunk // num_stages)) for chunk in range(num_chunks)]
    rooms = []
    for chunk in range(num_chunks):
        stage = chunk % num_stages
        room = max(0, tables.rates[stage].load_within(floor) - tables.fixed[stage])
        rooms.append(room * parts[chunk] // sum(parts[stage::num_stages]))
    return rooms


def _at(tables: Tables, places: Sequence[int], targets: Sequence[int]) -> tuple[int, ...]:
    """The cuts whose places are nearest to the targets, as far as every chunk then holds its fewest items."""
    ends, start = [], 0
    for chunk, target in enumerate(targets):
        low = start + tables.least[chunk]
        high = tables.num_items - sum(tables.least[chunk + 1 :])
        start = low if chunk + 1 < len(targets) else tables.num_items
        if chunk + 1 < len(targets):
            start = min(range(low, high + 1), key=lambda cut: (abs(places[cut] - target), cut))
        ends.append(start)
    return tuple(ends)


def _by_tree(tables: Tables, ends: tuple[int, ...] | None, floor: int) -> tuple[tuple[int, ...] | None, bool]:
    """The best split by the tree, no worse than `ends`, and whether that is proved; None: none was found."""
    if ends is not None and tables.peak(ends) <= floor:
        return ends, True
    if tables.num_chunks > _TREE_CHUNKS:
        return ends, False
    tree = Tree(tables, max_steps=_TREE_STEPS)
    try:
        while True:
            better = tree.any_within(tables.longest() if ends is None else tables.peak(ends) - 1)
            if better is None:
                return ends, True
            ends = better
    except OutOfSteps:
        return ends, False


def _least_moved(tables: Tables, found: Sequence[tuple[int, ...]], peak: int) -> tuple[int, ...]:
    """Of the splits as fast as `peak`, the one that moves the least, or without a current one has the fewest bytes."""
    bound = with_ties(peak)
    if tables.num_chunks <= _TREE_CHUNKS:
        try:
            closest = Tree(tables, max_steps=_TREE_STEPS).closest_within(bound)
        except OutOfSteps:
            closest = None
        if closest is not None:
            return closest
    slowed = []
    fast = [ends for ends in found if tables.peak(ends) <= bound]
    for start in dict.fromkeys((*_starts(tables, peak)[:1], *fast)):
        shifts = Shifts(tables, start, max_steps=_START_STEPS)
        if shifts.repair() and shifts.slow_to(bound):
            slowed.append(shifts)

    def cost(shifts: Shifts) -> tuple[int, int]:
        return tables.moved(shifts.ends), shifts.peak_bytes

    settled = sorted(slowed, key=cost)[:_SETTLED]
    for shifts in settled:
        shifts.settle(bound)
        if tables.homes is None:
            shifts.lighten(bound)
    return min(settled, key=cost).ends


def _message(tables: Tables, *, is_proved: bool) -> str:
    return (
        f"expected at most {tables.cap_bytes} bytes on each stage, got no split of {int(tables.cuts[-1])} layers over "
        f"{tables.num_chunks} chunks on {tables.num_stages} stages that meets this"
        f"{'' if is_proved else ' in a search that could not try all'}"
    )
