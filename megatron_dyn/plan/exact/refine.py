"""From the fastest slowest stage to the shortest step: the best of the splits that are nearly as good.

A step is not only as long as its slowest stage: filling and draining the pipeline takes time, too, and there a little
imbalance at the right end can pay. Called after `partition` with whatever predicts a step. It must not know schedules:
step times come from a callback.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import batched, islice, product
from random import Random

from megatron_dyn.plan.exact.branch import OutOfSteps, Tree
from megatron_dyn.plan.exact.tables import Tables, tables_of
from megatron_dyn.plan.problem import Split, SplitProblem

StepSeconds = Callable[[Sequence[tuple[int, ...]]], Sequence[float]]
"""Step time of each split of a batch, given its layers per chunk."""

_BATCH = 64
"""Splits that the callback is asked about at once."""
_SAME = 1e-9
"""Step times within this fraction of each other are equal: the rest is rounding of the simulation."""
_STEPS_PER_SPLIT = 8
"""Branches, and shifts, tried for each split that may be evaluated: enough to find them where they are few enough."""
_SHAKES = 50
"""Times that a local optimum is shaken at most, in search of a better one."""
_TREE_CHUNKS = 128
"""Splits over more chunks are never few; a tree goes as deep as there are chunks."""


def refine(
    split: Split,
    problem: SplitProblem,
    step_seconds: StepSeconds,
    *,
    slack: float,
    budget: int,
    more_starts: Sequence[tuple[int, ...]] = (),
) -> Split:
    """The split with the shortest step among those whose slowest stage is at most `slack` slower than that of `split`.

    `split` is the answer of `best_split` to `problem`. It stays unless another is better by more than 1e-9; of equally
    short steps the one that moves the fewest bytes is taken. At most `budget` splits are asked about: all there are
    within the slack, if these are no more, and the answer is then the best of them (`step_proved`). Otherwise those met
    while shifting one boundary, two, or a run of them, as long as that makes the step shorter, and again after a shake;
    the answer is then a local optimum. `more_starts` (layers per chunk) are where else that may begin. `bound_seconds`
    is that of `split`. Deterministic if `step_seconds` is. Raises ValueError for a slack or budget below 0.
    """
    if slack < 0.0 or budget < 0:
        raise ValueError(f"refine: expected slack and budget of at least 0, got {slack} and {budget}")
    tables = tables_of(problem)
    start = tables.ends(split.counts)
    assert start is not None, "only to be called with the answer to the same problem"
    bound = max(tables.peak(start), tables.time_within(split.bottleneck_seconds * (1.0 + slack)))
    search = _Search(tables, step_seconds, budget=budget)
    every = _all_within(tables, bound, budget)
    if every is None:
        current = () if problem.current is None else (problem.current,)
        search.climb([start, *_allowed(tables, (*current, *more_starts), bound)], bound)
    else:
        search.ask([start, *every])
    best = search.best(start)
    found = split if best == start else problem.split(tables.counts(best), bound_seconds=split.bound_seconds)
    return replace(found, step_proved=every is not None)


def _all_within(tables: Tables, bound: int, budget: int) -> list[tuple[int, ...]] | None:
    """Every split within the bound; None when there are more than `budget`, or that did not become clear."""
    if tables.num_chunks > _TREE_CHUNKS:
        return None
    found: list[tuple[int, ...]] = []
    try:
        for ends in Tree(tables, max_steps=_STEPS_PER_SPLIT * budget).all_within(bound):
            if len(found) == budget:
                return None
            found.append(ends)
    except OutOfSteps:
        return None
    return found


def _allowed(tables: Tables, splits: Iterable[tuple[int, ...]], bound: int) -> list[tuple[int, ...]]:
    """Those of the splits that are among the ones to choose from: the shortest step may be near them."""
    ends = (tables.ends(counts) for counts in splits)
    return [split for split in ends if split is not None and tables.allows(split, bound)]


class _Search:
    """What the callback was asked, and what it said."""

    def __init__(self, tables: Tables, step_seconds: StepSeconds, *, budget: int) -> None:
        self._tables = tables
        self._step_seconds = step_seconds
        self._budget = budget
        self._shifts_left = _STEPS_PER_SPLIT * budget
        self._seconds: dict[tuple[int, ...], float] = {}

    def ask(self, splits: Iterable[tuple[int, ...]]) -> None:
        """Learn the step times of these splits, as far as they are new and the budget reaches."""
        new = [ends for ends in dict.fromkeys(splits) if ends not in self._seconds]
        for batch in batched(new[: self._budget - len(self._seconds)], _BATCH):
            seconds = self._step_seconds([self._tables.counts(ends) for ends in batch])
            self._seconds.update(zip(batch, seconds, strict=True))

    def best(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """The shortest step known; `start` unless that is better."""
        limit = self._seconds.get(start, 0.0) * (1.0 - _SAME)
        better = {ends: seconds for ends, seconds in self._seconds.items() if seconds < limit}
        if not better:
            return start
        same = min(better.values()) * (1.0 + _SAME)
        equal = [ends for ends, seconds in better.items() if seconds <= same]
        return min(equal, key=lambda ends: (self._tables.moved(ends), better[ends], ends))

    def climb(self, starts: Sequence[tuple[int, ...]], bound: int) -> None:
        """Go up from the best start, then again and again from where a shake leads, as far as the budget reaches."""
        self.ask(starts)
        here = self._up(self.best(starts[0]), bound)
        # Seeded, and its numbers do not depend on the platform: all ranks shake alike.
        random = Random(0)
        for _ in range(_SHAKES):
            if len(self._seconds) >= self._budget or self._shifts_left <= 0:
                return
            there = self._shaken(here, bound, random)
            self.ask([there])
            if there in self._seconds and there != here:
                here = min(here, self._up(there, bound), key=self._seconds.__getitem__)

    def _up(self, here: tuple[int, ...], bound: int) -> tuple[int, ...]:
        """From here to better neighbours until there is none, or the budget is used up."""
        is_better = here in self._seconds
        while is_better:
            is_better = False
            for batch in batched(self._neighbours(here, bound), _BATCH):
                self.ask(batch)
                known = [ends for ends in batch if ends in self._seconds]
                there = min(known, key=self._seconds.__getitem__, default=here)
                is_better = self._seconds[there] < self._seconds[here] * (1.0 - _SAME)
                if is_better or len(self._seconds) >= self._budget:
                    break
            here = there if is_better else here
        return here

    def _shaken(self, ends: tuple[int, ...], bound: int, random: Random) -> tuple[int, ...]:
        """Some boundaries of a split shifted at random, as far as that is allowed."""
        shaken = ends
        for _ in range(2 * len(ends)):
            self._shifts_left -= 1
            neighbour = list(shaken)
            neighbour[random.randrange(len(ends) - 1)] += random.choice((1, -1))
            if self._tables.allows(neighbour, bound):
                shaken = tuple(neighbour)
        return shaken

    def _neighbours(self, ends: tuple[int, ...], bound: int) -> Iterator[tuple[int, ...]]:
        """Splits within the bound by one boundary shifted by an item, then by two, near ones first."""
        for shifts in islice(_shifts(len(ends) - 1), self._shifts_left):
            self._shifts_left -= 1
            neighbour = list(ends)
            for boundary, step in shifts:
                neighbour[boundary] += step
            if self._tables.allows(neighbour, bound):
                yield tuple(neighbour)


def _shifts(num_boundaries: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """(boundary, step) of all single shifts, then of pairs and of whole runs, by the distance of their ends.

    A run shifts all its boundaries one way: a layer leaves a stage, and every stage up to one further on hands one on.
    """
    yield from (((boundary, step),) for boundary in range(num_boundaries) for step in (1, -1))
    for distance in range(num_boundaries):
        for first, step, other in product(range(num_boundaries - distance), (1, -1), (1, -1)):
            # At one boundary two steps in turn lead back.
            if distance or step == other:
                yield (first, step), (first + distance, other)
            if distance > 1 and step == other:
                yield tuple((boundary, step) for boundary in range(first, first + distance + 1))
