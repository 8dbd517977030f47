"""Ledger rows that let code written for `torch.cuda` run where there is no CUDA device.

Streams and events become ordered-by-nature no-ops, memory statistics read 0, and the generator of the "device" is the
CPU's own. Put in force by `host.cpu.activate`; must not know Megatron.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any, Self

import torch

from megatron_dyn.host.cpu.torch_mode import CPU
from megatron_dyn.host.seams import Seam

_NEEDS_DRIVER = "torch raises without a CUDA driver"
_UNTIL = "Megatron asks torch.accelerator instead of torch.cuda"


class CpuStream:
    """Stands for `torch.cuda.Stream`: the CPU runs everything in program order, so waiting is done when asked for."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Accept the arguments of `torch.cuda.Stream`."""
        self.cuda_stream = 0
        self.device = CPU

    def wait_stream(self, _stream: Any) -> None:
        """Do nothing: whatever was issued before has run."""

    def wait_event(self, _event: Any) -> None:
        """Do nothing: whatever was issued before has run."""

    def synchronize(self) -> None:
        """Do nothing: whatever was issued before has run."""

    def query(self) -> bool:
        """Return True: everything has run."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record `event`, or a new one, now and return it."""
        event = CpuEvent() if event is None else event
        event.record()
        return event

    def __enter__(self) -> Self:
        """Return the stream."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Do nothing."""


class CpuEvent:
    """Stands for `torch.cuda.Event`: remembers the wall-clock time at which it was recorded."""

    def __init__(self, *_args: Any, **_options: Any) -> None:
        """Accept the arguments of `torch.cuda.Event`."""
        self._recorded_seconds = 0.0

    def record(self, _stream: Any = None) -> None:
        """Take the time."""
        self._recorded_seconds = time.perf_counter()

    def wait(self, _stream: Any = None) -> None:
        """Do nothing: whatever was issued before has run."""

    def synchronize(self) -> None:
        """Do nothing: whatever was issued before has run."""

    def query(self) -> bool:
        """Return True: everything has run."""
        return True

    def elapsed_time(self, end: CpuEvent) -> float:
        """Return the milliseconds from this event to `end`, as torch does."""
        return (end._recorded_seconds - self._recorded_seconds) * 1e3


def device_properties(*_args: Any, **_options: Any) -> SimpleNamespace:
    """Return what Megatron reads of a device; capability 0.0 keeps it from choosing any GPU feature."""
    return SimpleNamespace(name="cpu", major=0, minor=0, multi_processor_count=1, total_memory=0)


def tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type`: Megatron's optimizers recognise a dtype by the name of its CUDA tensor type."""

    @functools.wraps(original)
    def replacement(self: torch.Tensor, dtype: Any = None, *args: Any, **options: Any) -> Any:
        if dtype is None:
            # Under a TorchFunctionMode the original comes back here by name, so the answer may be translated already.
            name: str = original(self)
            return name if name.startswith("torch.cuda.") else name.replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **options)

    return replacement


def _answer(value: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrap whose replacement ignores its arguments and returns `value`."""

    def wrap(_original: Any) -> Callable[..., Any]:
        def replacement(*_args: Any, **_options: Any) -> Any:
            return value

        return replacement

    return wrap


def _call(function: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """Return a wrap whose replacement passes its arguments on to `function`."""

    def wrap(_original: Any) -> Callable[..., Any]:
        def replacement(*args: Any, **options: Any) -> Any:
            return function(*args, **options)

        return replacement

    return wrap


def _subclass(base: type) -> Callable[[Any], type]:
    """Return a wrap that stands a fresh subclass of `base` in for a class, since each replacement is marked as ours."""

    def wrap(original: Any) -> type:
        return type(original.__name__, (base,), {})

    return wrap


def _no_context(*_args: Any, **_options: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _get_rng_state(_device: Any = None, **_options: Any) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, _device: Any = None, **_options: Any) -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(seed)


def _itself(value: Any, *_args: Any, **_options: Any) -> Any:
    return value


_REPLACEMENTS: dict[str, Callable[[Any], Any]] = {
    "torch.cuda:Stream": _subclass(CpuStream),
    "torch.cuda:Event": _subclass(CpuEvent),
    "torch.cuda:current_stream": _call(CpuStream),
    "torch.cuda:default_stream": _call(CpuStream),
    "torch.cuda:set_stream": _answer(None),
    "torch.cuda:stream": _call(_no_context),
    "torch.cuda:device": _call(_no_context),
    "torch.cuda:current_device": _answer(CPU),
    "torch.cuda:set_device": _answer(None),
    "torch.cuda:synchronize": _answer(None),
    "torch.cuda:empty_cache": _answer(None),
    "torch.cuda:is_current_stream_capturing": _answer(False),
    "torch.cuda:get_device_capability": _answer((0, 0)),
    "torch.cuda:get_device_name": _answer("cpu"),
    "torch.cuda:get_device_properties": _call(device_properties),
    "torch.cuda:memory_allocated": _answer(0),
    "torch.cuda:max_memory_allocated": _answer(0),
    "torch.cuda:memory_reserved": _answer(0),
    "torch.cuda:max_memory_reserved": _answer(0),
    "torch.cuda:device_memory_used": _answer(0),
    "torch.cuda:memory_stats": lambda _original: lambda *_args, **_options: {},
    "torch.cuda:mem_get_info": _answer((0, 0)),
    "torch.cuda:reset_peak_memory_stats": _answer(None),
    "torch.cuda.nvtx:range_push": _answer(0),
    "torch.cuda.nvtx:range_pop": _answer(0),
    # The functions of torch.cuda.random are also copied into torch.cuda, and Megatron uses both names.
    "torch.cuda:get_rng_state": _call(_get_rng_state),
    "torch.cuda.random:get_rng_state": _call(_get_rng_state),
    "torch.cuda:set_rng_state": _call(_set_rng_state),
    "torch.cuda.random:set_rng_state": _call(_set_rng_state),
    "torch.cuda:manual_seed": _call(_manual_seed),
    "torch.cuda.random:manual_seed": _call(_manual_seed),
    "torch.cuda:initial_seed": _call(torch.initial_seed),
    "torch:Tensor.cuda": _call(_itself),
    "torch:Tensor.pin_memory": _call(_itself),
    "torch:Tensor.record_stream": _answer(None),
}

TORCH_ROWS: tuple[Seam, ...] = (
    *(Seam(target=target, why=_NEEDS_DRIVER, remove_when=_UNTIL, wrap=wrap) for target, wrap in _REPLACEMENTS.items()),
    Seam(
        target="torch:Tensor.type",
        why="gradient clipping and the optimizers compare with 'torch.cuda.FloatTensor' and refuse anything else",
        remove_when="Megatron compares dtypes",
        wrap=tensor_type,
    ),
)
