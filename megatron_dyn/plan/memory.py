"""How many bytes a pipeline stage needs under non-interleaved 1F1B, and a cap on them.

Used by `partition` to keep stages under the cap and by `decide`, which builds the budget from a Snapshot. It must not
know devices or allocators: the bytes are those that the measure stage reported.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_dyn.records import Snapshot

_LARGEST = 2**61
"""Sizes are summed in int64; sums below this leave room for a difference of two."""


def in_flight_microbatches(num_microbatches: int, num_stages: int) -> tuple[int, ...]:
    """Most micro-batches whose activations stage 0, 1, ... of 1F1B holds at once.

    Stage `s` of `p` runs `p - s - 1` forwards ahead and then one more before its first backward frees anything.
    Raises ValueError when either count is below 1.
    """
    if num_microbatches < 1 or num_stages < 1:
        raise ValueError(
            f"in_flight_microbatches: expected at least 1 micro-batch and 1 stage, got {num_microbatches} and {num_stages}"
        )
    return tuple(min(num_microbatches, num_stages - stage) for stage in range(num_stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the layers need on each stage, and the most that a stage may need. Bytes throughout."""

    state_bytes: tuple[int, ...]
    """By layer: parameters, gradients and optimizer state; the same on every stage."""
    activation_bytes: tuple[int, ...]
    """By layer: what one micro-batch keeps for its backward."""
    in_flight: tuple[int, ...]
    """By stage: micro-batches whose activations are held at once."""
    first_bytes: int = 0
    """On the first stage whatever its layers: embedding state and in-flight activations."""
    last_bytes: int = 0
    """On the last stage whatever its layers: head state and in-flight activations."""
    cap_bytes: int
    """The most that any one stage may need."""

    def __post_init__(self) -> None:
        """Refuse tables of different length and negative sizes; raises ValueError."""
        if len(self.state_bytes) != len(self.activation_bytes):
            raise ValueError(
                f"MemoryBudget: state_bytes has {len(self.state_bytes)} layers, "
                f"activation_bytes has {len(self.activation_bytes)}"
            )
        sizes = (*self.state_bytes, *self.activation_bytes, *self.in_flight, self.first_bytes, self.last_bytes)
        if min((*sizes, self.cap_bytes)) < 0:
            raise ValueError(f"MemoryBudget: expected sizes of at least 0, got {min((*sizes, self.cap_bytes))}")
        largest = sum(self.state_bytes) + max(self.in_flight, default=0) * sum(self.activation_bytes)
        if not self.in_flight or largest + self.first_bytes + self.last_bytes >= _LARGEST:
            raise ValueError(
                f"MemoryBudget: expected at least 1 stage and sizes that sum below {_LARGEST} bytes, got "
                f"{len(self.in_flight)} stages and up to {largest + self.first_bytes + self.last_bytes} bytes"
            )

    def fixed_bytes(self, stage: int) -> int:
        """Bytes that `stage` needs without any layer."""
        is_last = stage == len(self.in_flight) - 1
        return (self.first_bytes if stage == 0 else 0) + (self.last_bytes if is_last else 0)

    def layer_bytes(self, stage: int, layer: int) -> int:
        """Bytes that `layer` adds when `stage` holds it."""
        return self.state_bytes[layer] + self.in_flight[stage] * self.activation_bytes[layer]

    def stage_bytes(self, stage: int, layers: range) -> int:
        """Bytes that `stage` needs when it holds `layers`."""
        return self.fixed_bytes(stage) + sum(self.layer_bytes(stage, layer) for layer in layers)

    def furthest_ends(self) -> npt.NDArray[np.int64]:
        """[stages, layers + 1]: for each first layer, the end (exclusive) of the longest run that fits the stage.

        A row's entry `a` is at least `a`, and exactly `a` where not even layer `a` fits. Only for budgets in which
        every stage's `fixed_bytes` fit the cap.
        """
        rows = []
        state = np.array([0, *self.state_bytes], dtype=np.int64).cumsum()
        activation = np.array([0, *self.activation_bytes], dtype=np.int64).cumsum()
        for stage, in_flight in enumerate(self.in_flight):
            needed = state + in_flight * activation
            room = min(self.cap_bytes, _LARGEST) - self.fixed_bytes(stage)
            rows.append(np.searchsorted(needed, needed + room, side="right") - 1)
        return np.array(rows)


def memory_budget(snapshot: Snapshot, *, num_stages: int, cap_bytes: int) -> MemoryBudget:
    """The budget for a split of the snapshot's layers over the first `num_stages` stages of its layout.

    The head counts only where it shares the last of those stages with decoder layers; stages behind them hold no
    decoder layer whatever the split, so there is nothing to decide about their memory.
    """
    in_flight = in_flight_microbatches(snapshot.num_microbatches, snapshot.layout.num_stages)[:num_stages]
    embedding, head = snapshot.embedding, snapshot.head
    has_head = snapshot.layout.chunks[num_stages - 1].loss
    return MemoryBudget(
        state_bytes=tuple(cost.state_bytes for cost in snapshot.layers),
        activation_bytes=tuple(cost.activation_bytes for cost in snapshot.layers),
        in_flight=in_flight,
        first_bytes=embedding.state_bytes + in_flight[0] * embedding.activation_bytes,
        last_bytes=head.state_bytes + in_flight[-1] * head.activation_bytes if has_head else 0,
        cap_bytes=cap_bytes,
    )
