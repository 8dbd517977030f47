"""Ledger rows for parts of the model that Megatron leaves to Transformer Engine or Apex, and torch can do as well.

Put in force by `host.cpu.activate`: sequence parallelism with torch's norms, and experts' all-to-all.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dyn.host.seams import Seam


def _mark_for_sequence_parallelism(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `WrappedTorchNorm.__new__`: a norm works on each token by itself, its weights' gradients need to be summed."""

    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **options: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **options)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **options)
        for parameter in norm.parameters():
            # By this mark finalize_model_grads knows whose gradients to sum over the tensor-parallel ranks.
            parameter.sequence_parallel = True
        return norm

    return new


def _as_host_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `maybe_move_tensor_to_cpu`: what is on the CPU already becomes what the caller asked for, too."""

    @functools.wraps(original)
    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved

    return maybe_move_tensor_to_cpu


MODEL_ROWS: tuple[Seam, ...] = (
    Seam(
        target="megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        why="it refuses sequence parallelism, since nothing marks the weights of torch's norms for the sum over ranks",
        remove_when="WrappedTorchNorm marks its parameters with sequence_parallel",
        parameters=("cls", "config"),
        wrap=_mark_for_sequence_parallelism,
    ),
    Seam(
        target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
        why="it makes numpy arrays of CUDA tensors only, and all-to-all does not take tensors as split sizes",
        remove_when="it honours as_numpy for tensors on the CPU",
        parameters=("tensor", "as_numpy", "record_stream"),
        wrap=_as_host_value,
    ),
)
