"""Puts the CPU platform in force, and takes it back: the order of its parts. It must not know what any row is for."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack

import torch

from megatron_dyn.host.cpu.async_rows import ASYNC_ROWS
from megatron_dyn.host.cpu.bootstrap import limit_threads, set_environment
from megatron_dyn.host.cpu.gloo_rows import GLOO_ROWS
from megatron_dyn.host.cpu.megatron_rows import MEGATRON_ROWS
from megatron_dyn.host.cpu.model_rows import MODEL_ROWS
from megatron_dyn.host.cpu.optimizer_rows import OPTIMIZER_ROWS
from megatron_dyn.host.cpu.torch_mode import CpuMode
from megatron_dyn.host.cpu.torch_rows import TORCH_ROWS
from megatron_dyn.host.seams import Seam, Undo, apply

CPU_ROWS: tuple[Seam, ...] = (*TORCH_ROWS, *GLOO_ROWS, *MEGATRON_ROWS, *MODEL_ROWS, *OPTIMIZER_ROWS, *ASYNC_ROWS)
"""Every row of the CPU platform, in the order of application."""


def activate() -> Undo:
    """Put the CPU platform in force in this process and return the handle that takes it back.

    Call it on every rank, from the main thread and before `pretrain()`: what depends on the thread (device literals)
    holds for the calling thread only. Raises `SeamError`, with nothing in force, where the installed Megatron or torch
    does not fit.
    """
    with ExitStack() as stack:
        limit_threads(os.environ, stack)
        # Megatron refuses tensor parallelism on devices before Blackwell without it.
        set_environment({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, stack)
        _silence_shared_generator(stack)
        # torch.compile would call a C++ compiler for functions that Megatron compiles for the sake of the GPU.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(CpuMode())
        stack.enter_context(apply(CPU_ROWS))
        return Undo(stack.pop_all())


def _silence_shared_generator(stack: ExitStack) -> None:
    """Drop a warning that is wrong here: the device's generator is the CPU's, so forking the one changes the other."""
    logger = logging.getLogger("megatron.core.tensor_parallel.random")

    def is_other(record: logging.LogRecord) -> bool:
        return record.msg != "CPU RNG state changed within GPU RNG context"

    logger.addFilter(is_other)
    stack.callback(logger.removeFilter, is_other)
