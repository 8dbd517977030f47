"""The order in which Megatron's pipeline schedules run: which chunk and micro-batch, forward or backward, on which rank.

Used by `program`, which adds the transfers, and for memory: how many activations a rank holds. The rules are those of
`megatron.core.pipeline_parallel.schedules` (0.19), in our own words; `tests/distributed/test_simulator.py` compares them
with what Megatron ran. It must not know times.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache


class Phase(StrEnum):
    """What an operation does."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One micro-batch through one chunk, one way."""

    phase: Phase
    chunk: int
    """In layer order, over all stages."""
    microbatch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The shape of a step; with it the order of its operations is settled.

    With virtual stages a rank works in *slots*: in slot `k` it runs one of its chunks on one micro-batch, forwards in the
    order of `slots`, backwards in the same order with its chunks reversed.
    """

    num_stages: int
    num_microbatches: int
    num_virtual: int = 1
    """Chunks on each stage; 1 is the schedule without interleaving."""
    group_size: int | None = None
    """Micro-batches that run through a chunk before the rank turns to its next (Megatron's
    `--microbatch-group-size-per-virtual-pipeline-stage`); None: as many as stages. Without virtual stages of no effect."""
    forward_only: bool = False
    """Evaluation: no backward."""
    slots: tuple[tuple[int, int], ...] = field(init=False, compare=False, repr=False)
    """By slot: (which of its own chunks a rank runs forward, micro-batch)."""

    def __post_init__(self) -> None:
        """Refuse what Megatron refuses; raises ValueError."""
        for name in ("num_stages", "num_microbatches", "num_virtual"):
            if getattr(self, name) < 1:
                raise ValueError(f"schedule: {name}: expected at least 1, got {getattr(self, name)}")
        if self.num_virtual > 1:
            self._check_groups()
        object.__setattr__(self, "slots", tuple(self._slots()))

    @property
    def num_chunks(self) -> int:
        """Chunks of all stages."""
        return self.num_stages * self.num_virtual

    def num_warmup(self, pp_rank: int) -> int:
        """Forwards that `pp_rank` runs before it starts to alternate between one forward and one backward."""
        if self.forward_only:
            return len(self.slots)
        behind = self.num_stages - pp_rank - 1
        if self.num_virtual > 1:
            behind = 2 * behind + (self.num_virtual - 1) * self._group
        return min(behind, len(self.slots))

    def forward(self, pp_rank: int, slot: int) -> Op:
        """The forward that `pp_rank` runs in its slot."""
        virtual, microbatch = self.slots[slot]
        return Op(phase=Phase.FORWARD, chunk=virtual * self.num_stages + pp_rank, microbatch=microbatch)

    def backward(self, pp_rank: int, slot: int) -> Op:
        """The backward that `pp_rank` runs in its slot."""
        virtual, microbatch = self.slots[slot]
        chunk = (self.num_virtual - 1 - virtual) * self.num_stages + pp_rank
        return Op(phase=Phase.BACKWARD, chunk=chunk, microbatch=microbatch)

    def operations(self, pp_rank: int) -> Iterator[Op]:
        """All that `pp_rank` runs in a step, in order."""
        num_warmup = self.num_warmup(pp_rank)
        num_steady = len(self.slots) - num_warmup
        yield from (self.forward(pp_rank, slot) for slot in range(num_warmup))
        for slot in range(num_steady):
            yield self.forward(pp_rank, num_warmup + slot)
            yield self.backward(pp_rank, slot)
        if not self.forward_only:
            yield from (self.backward(pp_rank, slot) for slot in range(num_steady, len(self.slots)))

    @property
    def _group(self) -> int:
        return self.num_stages if self.group_size is None else self.group_size

    def _slots(self) -> Iterator[tuple[int, int]]:
        step = self._group if self.num_virtual > 1 else self.num_microbatches
        for first in range(0, self.num_microbatches, step):
            group = range(first, min(first + step, self.num_microbatches))
            yield from ((virtual, microbatch) for virtual in range(self.num_virtual) for microbatch in group)

    def _check_groups(self) -> None:
        if self.num_stages < 2:
            raise ValueError(f"schedule: virtual stages need at least 2 pipeline stages, got {self.num_stages}")
        if not self.num_stages <= self._group <= self.num_microbatches:
            raise ValueError(
                f"schedule: with virtual stages a group of micro-batches must be between the {self.num_stages} stages and the "
                f"{self.num_microbatches} micro-batches in size, got {self._group}"
            )
        rest = self.num_microbatches % self._group
        if 0 < rest < self.num_stages:
            raise ValueError(
                f"schedule: with virtual stages the last group of micro-batches must be full or hold at least "
                f"{self.num_stages}, one for each stage, got {rest} ({self.num_microbatches} in groups of {self._group})"
            )


def operations(
    pp_rank: int,
    *,
    num_stages: int,
    num_virtual: int,
    num_microbatches: int,
    group_size: int | None = None,
    forward_only: bool = False,
) -> tuple[Op, ...]:
    """All that `pp_rank` runs in a step, in order. Raises ValueError for shapes that Megatron refuses."""
    if not 0 <= pp_rank < num_stages:
        raise ValueError(f"operations: pp_rank: expected 0 to {num_stages - 1}, got {pp_rank}")
    schedule = Schedule(
        num_stages=num_stages,
        num_virtual=num_virtual,
        num_microbatches=num_microbatches,
        group_size=group_size,
        forward_only=forward_only,
    )
    return tuple(schedule.operations(pp_rank))


@lru_cache(maxsize=64)
def in_flight_by_chunk(
    num_microbatches: int, num_stages: int, num_virtual: int = 1, group_size: int | None = None
) -> tuple[int, ...]:
    """By chunk: the most micro-batches whose activations it holds at any time, one for each forward begun.

    With virtual stages the chunks of a rank do not all hold their most at one time, so the sum over them is a bound: a cap
    that it keeps to is kept whatever the sizes of the chunks. What a rank really needs is `peak_activation_bytes` of a
    simulated step. Raises ValueError for shapes that Megatron refuses.
    """
    schedule = Schedule(
        num_stages=num_stages, num_microbatches=num_microbatches, num_virtual=num_virtual, group_size=group_size
    )
    if num_virtual == 1:
        return tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))
    most = [0] * schedule.num_chunks
    for pp_rank in range(num_stages):
        held = [0] * schedule.num_chunks
        for op in schedule.operations(pp_rank):
            held[op.chunk] += 1 if op.phase is Phase.FORWARD else -1
            most[op.chunk] = max(most[op.chunk], held[op.chunk])
    return tuple(most)
