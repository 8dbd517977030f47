"""Records what each training step gave, in every bit.

For tests and for reports that compare two runs; it must not know who moved what between two steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron_dyn.host.seams import Seam, apply


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one training step gave on one rank; floats in hex, so that equality means equality in every bit."""

    iteration: int
    """1-based number of the step."""
    loss: str | None
    """Mean loss per token over the global batch; None on ranks that do not hold the last stage."""
    grad_norm: str | None
    """Norm of the gradient over all parameters, before clipping; None where the step was skipped (fp16)."""


@contextmanager
def recorded_steps() -> Iterator[list[Step]]:
    """Record every training step of this process while the block runs; the list it yields grows with each.

    Enter it on each rank whose steps are wanted, before training starts.
    """
    steps: list[Step] = []

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def train_step(*args: Any, **options: Any) -> Any:
            from megatron.training import get_args

            outcome = original(*args, **options)
            loss_by_name, grad_norm = outcome[0], outcome[5]
            iteration = get_args().curr_iteration + 1
            loss = float(loss_by_name["lm loss"]).hex() if loss_by_name else None
            norm = None if grad_norm is None else float(grad_norm).hex()
            steps.append(Step(iteration=iteration, loss=loss, grad_norm=norm))
            return outcome

        return train_step

    row = Seam(
        target="megatron.training.training:train_step",
        why="Megatron logs losses rounded; tests compare them bit for bit",
        remove_when="a callback of Megatron's gets loss and norm of each step",
        parameters=("data_iterator", "model", "optimizer"),
        wrap=wrap,
    )
    with apply([row]):
        yield steps
