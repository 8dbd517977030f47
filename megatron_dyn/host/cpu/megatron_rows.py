"""Ledger rows for the places in Megatron itself that refuse to run without a CUDA device.

Put in force by `host.cpu.activate`, after the rows for torch, on which they build.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dyn.host.seams import Seam, apply

_ONE_DEVICE = Seam(
    target="torch.cuda:device_count",
    why="where it counts no device, Megatron skips its process groups and the seeding of its RNG tracker",
    remove_when="initialize_megatron sets up model parallelism under allow_no_cuda",
    wrap=lambda _original: lambda: 1,
)


def _initialize_without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `initialize_megatron`: allow that there is no device, and count one while it sets up groups and seeds."""

    @functools.wraps(original)
    def initialize_megatron(*args: Any, **options: Any) -> Any:
        with apply([_ONE_DEVICE]):
            return original(*args, **{**options, "allow_no_cuda": True})

    return initialize_megatron


def _set_state(_original: Callable[..., Any]) -> Callable[..., None]:
    def set_cuda_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.default_generator.set_state(new_state)

    return set_cuda_rng_state


def _give_own_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `build_pretraining_data_loader`: the loader draws its worker seeds from a generator of its own."""

    @functools.wraps(original)
    def build_pretraining_data_loader(*args: Any, **options: Any) -> Any:
        loader = original(*args, **options)
        if isinstance(loader, torch.utils.data.DataLoader) and loader.generator is None:
            loader.generator = torch.Generator().manual_seed(torch.initial_seed())
        return loader

    return build_pretraining_data_loader


MEGATRON_ROWS: tuple[Seam, ...] = (
    Seam(
        target="megatron.training.training:initialize_megatron",
        why="pretrain() asserts that there is a CUDA device, and without one sets up neither groups nor RNG tracker",
        remove_when="pretrain() passes allow_no_cuda on and honours it",
        parameters=("allow_no_cuda",),
        wrap=_initialize_without_cuda,
    ),
    Seam(
        target="megatron.core.tensor_parallel.random:_set_cuda_rng_state",
        why="it leaves a callback for torch.cuda's initialisation, which never comes: the tracker has no effect",
        remove_when="it calls torch.cuda.set_rng_state",
        parameters=("new_state",),
        wrap=_set_state,
    ),
    Seam(
        target="megatron.training.training:build_pretraining_data_loader",
        why="here the CPU's generator is the device's: a loader that draws its worker seeds from it changes the "
        "dropout that follows, and a resumed run differs from the run it continues",
        remove_when="Megatron gives its data loaders a generator",
        wrap=_give_own_generator,
    ),
)
