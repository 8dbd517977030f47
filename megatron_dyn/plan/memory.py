"""How many bytes a pipeline stage needs, and a cap on them.

Used by the algorithms to keep stages under the cap; a Job builds the budget. It must not
know devices or allocators: the bytes are those that the measure stage reported.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_LARGEST = 2**61
"""Sizes are summed in int64; sums below this leave room for a difference of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the layers need on each chunk, and the most that a stage may need with all its chunks. Bytes throughout.

    Without virtual stages chunk and stage are the same.
    """

    state_bytes: tuple[int, ...]
    """By layer: parameters, gradients and optimizer state; the same on every stage."""
    activation_bytes: tuple[int, ...]
    """By layer: what one micro-batch keeps for its backward."""
    in_flight: tuple[int, ...]
    """By chunk: the most micro-batches whose activations it holds at any time."""
    first_bytes: int = 0
    """On the first chunk whatever its layers: embedding state and in-flight activations."""
    last_bytes: int = 0
    """On the last chunk whatever its layers: head state and in-flight activations."""
    rank_bytes: tuple[int, ...] | None = None
    """By pp_rank: what else the stage needs whatever its layers, such as ends on chunks that hold no layer; None: nothing."""
    cap_bytes: int
    """The most that any one stage may need."""

    def __post_init__(self) -> None:
        """Refuse tables of different length and negative sizes; raises ValueError."""
        if len(self.state_bytes) != len(self.activation_bytes):
            raise ValueError(
                f"MemoryBudget: state_bytes has {len(self.state_bytes)} layers, "
                f"activation_bytes has {len(self.activation_bytes)}"
            )
        ends = (self.first_bytes, self.last_bytes, *(self.rank_bytes or ()))
        sizes = (*self.state_bytes, *self.activation_bytes, *self.in_flight, *ends)
        if min((*sizes, self.cap_bytes)) < 0:
            raise ValueError(f"MemoryBudget: expected sizes of at least 0, got {min((*sizes, self.cap_bytes))}")
        largest = sum(self.state_bytes) + max(self.in_flight, default=0) * sum(self.activation_bytes) + sum(ends)
        if not self.in_flight or largest >= _LARGEST:
            raise ValueError(
                f"MemoryBudget: expected at least 1 stage and sizes that sum below {_LARGEST} bytes, got "
                f"{len(self.in_flight)} stages and up to {largest} bytes"
            )

    def fixed_bytes(self, chunk: int) -> int:
        """Bytes that `chunk` needs without any layer; what is there by pp_rank is not part of it."""
        is_last = chunk == len(self.in_flight) - 1
        return (self.first_bytes if chunk == 0 else 0) + (self.last_bytes if is_last else 0)

    def layer_bytes(self, chunk: int, layer: int) -> int:
        """Bytes that `layer` adds when `chunk` holds it."""
        return self.state_bytes[layer] + self.in_flight[chunk] * self.activation_bytes[layer]

    def stage_bytes(self, chunk: int, layers: range) -> int:
        """Bytes that `chunk` needs when it holds `layers`; what is there by pp_rank is not part of it."""
        return self.fixed_bytes(chunk) + sum(self.layer_bytes(chunk, layer) for layer in layers)

    def needed_bytes(self) -> npt.NDArray[np.int64]:
        """[chunks, layers + 1]: bytes that the layers before each boundary would add to each chunk."""
        state = np.array([0, *self.state_bytes], dtype=np.int64).cumsum()
        activation = np.array([0, *self.activation_bytes], dtype=np.int64).cumsum()
        return state + np.outer(np.array(self.in_flight, dtype=np.int64), activation)
