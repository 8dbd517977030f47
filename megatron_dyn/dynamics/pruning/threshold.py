"""Which units stay when exactly so many weights may: the largest of the whole model, without gathering a weight.

Every rank counts how many of its weights begin with which bits of the score, three times, finer each time; the sums over all
ranks give the threshold to the last bit. Units that lie exactly on it stay in the order of their keys (layer, name, place)
and of their index, so that the answer does not depend on where layers lie. Knows no Megatron.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dyn.dynamics.pruning.units import GONE, Units

Key = tuple[int, str, tuple[int, int]]
"""(global layer id, parameter name, (expert-parallel rank, tensor-parallel rank) of the slice): the same on all replicas."""

SumCounts = Callable[[torch.Tensor, str], torch.Tensor]
"""See ports.Job.sum_counts."""
Gather = Callable[[Any, str], list[Any]]
"""See ports.Job.gather."""

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""(bits below, bits of it) of each digit of a score: 31 bits in all, since the sign is never set."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The units of one slice of a weight on this rank."""

    key: Key
    units: Callable[[], Units]
    """Scores them; asked five times, so that the scores of one weight at a time are held, not those of all."""
    scope: int
    """Number of the scope within which the slice competes."""
    speaks: bool
    """Whether this rank counts for the slice: true on exactly one of its replicas."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which units stay."""

    kept: Mapping[Key, torch.Tensor]
    """bool, one per unit, for every local shard."""
    thresholds: tuple[float, ...]
    """By scope: what is larger stays, what is smaller goes; 0.0 where everything that was left stays."""


def choose(shards: Sequence[Shard], budgets: Sequence[int], sum_counts: SumCounts, gather: Gather) -> Choice:
    """Keep the largest units of each scope, as many as fit in its budget of weights.

    Units of equal size fill the budget exactly, up to one unit; of unequal sizes, up to the first that does not fit. All
    ranks must call with the same `budgets` (one per scope).
    """
    search = _Search(shards, budgets)
    for below, width in _DIGITS:
        search.refine(sum_counts(search.counts(below, width), "counts of magnitudes"), width)
    allowed = _ties(shards, search, gather)
    kept = {shard.key: _kept(shard, search, allowed.get(shard.key, 0)) for shard in shards}
    thresholds = [_magnitude(0 if full else found) for found, full in zip(search.prefix, search.full, strict=True)]
    return Choice(kept, tuple(thresholds))


class _Search:
    """The leading bits of each scope's threshold, found digit by digit from the highest."""

    def __init__(self, shards: Sequence[Shard], budgets: Sequence[int]) -> None:
        self._shards = shards
        self.prefix = [0] * len(budgets)
        self.left = list(budgets)
        """Weights that may still stay among those whose scores begin with the prefix."""
        self.full = [False] * len(budgets)
        """Whether everything fits, so that there is no threshold."""

    def counts(self, below: int, width: int) -> torch.Tensor:
        """Weights by scope and next digit among the scores that begin with the prefix: int64, on the CPU."""
        counts = torch.zeros(len(self.prefix), 1 << width, dtype=torch.int64)
        for shard in self._shards:
            if not shard.speaks:
                continue
            units = shard.units()
            fitting = (units.scores >= 0) & (units.scores >> (below + width) == self.prefix[shard.scope])
            digits = (units.scores[fitting] >> below) & ((1 << width) - 1)
            counts[shard.scope] += torch.bincount(digits, minlength=1 << width).cpu() * units.size
        return counts

    def refine(self, counts: torch.Tensor, width: int) -> None:
        """Take the digit at which the budget runs out, given the counts of all ranks."""
        for scope, row in enumerate(counts):
            from_top = row.flip(0).cumsum(0)
            over = (from_top > self.left[scope]).nonzero()
            if self.full[scope] or not len(over):
                self.full[scope] = True
                continue
            place = int(over[0])
            self.left[scope] -= int(from_top[place - 1]) if place else 0
            self.prefix[scope] = self.prefix[scope] << width | (len(row) - 1 - place)


def _ties(shards: Sequence[Shard], search: _Search, gather: Gather) -> dict[Key, int]:
    """How many of the units that lie on the threshold stay, by shard."""
    mine = {}
    for shard in shards:
        if shard.speaks and not search.full[shard.scope]:
            units = shard.units()
            mine[shard.key] = (shard.scope, int((units.scores == search.prefix[shard.scope]).sum()), units.size)
    everywhere = {key: found for theirs in gather(mine, "units on the threshold") for key, found in theirs.items()}
    left, allowed = list(search.left), {}
    for key, (scope, count, size) in sorted(everywhere.items()):
        allowed[key] = min(count, left[scope] // size)
        # Once a unit does not fit, no later one may: what stays would depend on how weights are cut.
        left[scope] = left[scope] - allowed[key] * size if allowed[key] == count else 0
    return allowed


def _kept(shard: Shard, search: _Search, num_ties: int) -> torch.Tensor:
    scores = shard.units().scores
    if search.full[shard.scope]:
        return scores != GONE
    threshold = search.prefix[shard.scope]
    kept = scores > threshold
    kept[(scores == threshold).nonzero().view(-1)[:num_ties]] = True
    return kept


def _magnitude(bits: int) -> float:
    """The fp32 number with these bits."""
    return float(struct.unpack("<f", struct.pack("<I", bits))[0])
