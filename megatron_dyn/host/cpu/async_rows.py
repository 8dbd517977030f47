"""Ledger rows for asynchronous checkpoints: a writer process that knows the CPU platform, and a snapshot to write from.

On a GPU machine the writer copies tensors off the device, which is both at once. Put in force by `host.cpu.activate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dyn.host.seams import Seam


def _fork_the_writer(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `init_persistent_async_worker`: the writer starts as a copy of this process, with all rows in force."""

    @functools.wraps(original)
    def init_persistent_async_worker(rank: int, mp_mode: str = "fork") -> None:
        original(rank, "fork")

    return init_persistent_async_worker


def _write_a_snapshot(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `schedule_async_save`: hand the writer copies of the tensors, as they are now."""

    @functools.wraps(original)
    def schedule_async_save(async_request: Any) -> Any:
        if async_request.async_fn is None:
            # Nothing to write on this rank.
            return original(async_request)
        rank, buckets, results = async_request.async_fn_args
        copies = [
            (path, name, (texts, [(item, _copied(tensor)) for item, tensor in tensors]))
            for path, name, (texts, tensors) in buckets
        ]
        return original(async_request._replace(async_fn_args=[rank, copies, results], preload_fn=None))

    return schedule_async_save


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


ASYNC_ROWS: tuple[Seam, ...] = (
    Seam(
        target="megatron.training.initialize:init_persistent_async_worker",
        why="a fresh interpreter does not have these rows: its writer divides by the number of CUDA devices, dies, and the "
        "first save waits for it for ever",
        remove_when="the writer asks for a device only where there is one",
        parameters=("rank", "mp_mode"),
        wrap=_fork_the_writer,
    ),
    Seam(
        target="megatron.training.checkpointing:schedule_async_save",
        why="the writer shares the memory of CPU tensors instead of copying it: it would write what later steps make of them",
        remove_when="the writer's preload_tensors copies CPU tensors",
        parameters=("async_request",),
        wrap=_write_a_snapshot,
    ),
)
