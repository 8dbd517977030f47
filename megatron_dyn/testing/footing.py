"""What a process stands on: the groups, threads, handles, hooks, tensors and memory that must not grow with every move.

Taken between steps of a running job, on one rank; reads /proc, so Linux only. Must not know what a move is.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Footing:
    """Counts of what one rank holds at one moment."""

    process_groups: int
    threads: int
    file_handles: int
    hooks: int
    """Forward and pre-forward hooks on all modules, and gradient accumulators that DDP keeps for its own."""
    tensors: int
    """Live tensors that the garbage collector knows."""
    resident_bytes: int

    @property
    def counts(self) -> tuple[int, ...]:
        """All but the memory, which an allocator rounds and keeps as it likes."""
        return (self.process_groups, self.threads, self.file_handles, self.hooks, self.tensors)


def footing(model: Sequence[torch.nn.Module]) -> Footing:
    """This rank's counts now; `model` is the list that `setup_model_and_optimizer` returned. Collects garbage first."""
    gc.collect()
    modules = [module for chunk in model for module in chunk.modules()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
    accumulators: list[Any] = [accumulator for chunk in model for accumulator in getattr(chunk, "grad_accs", [])]
    return Footing(
        process_groups=len(dist.distributed_c10d._world.pg_map),
        threads=threading.active_count(),
        file_handles=len(os.listdir("/proc/self/fd")),
        hooks=hooks + len(accumulators),
        tensors=sum(1 for each in gc.get_objects() if isinstance(each, torch.Tensor)),
        resident_bytes=int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
    )
