"""What sends tensors to the CPU where Megatron names a CUDA device: literals, device indices, pinned memory.

In force for the thread that entered it, through `host.cpu.activate`. It must not know Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")


def cpu_instead(device: Any) -> Any:
    """Return the CPU for what means a CUDA device (`"cuda"`, `"cuda:1"`, a device object, an index), else the value."""
    names_cuda = isinstance(device, str) and (device == "cuda" or device.startswith("cuda:"))
    is_cuda = isinstance(device, torch.device) and device.type == "cuda"
    # A bool is an int to Python, but in torch's signatures it is never a device.
    is_index = isinstance(device, int) and not isinstance(device, bool)
    return CPU if names_cuda or is_cuda or is_index else device


def _on_cpu(option: str, value: Any) -> Any:
    """Return the value that an option of a call into torch takes on the CPU."""
    if option == "device":
        return cpu_instead(value)
    return False if option == "pin_memory" else value


class CpuMode(TorchFunctionMode):
    """Rewrites the device of every call into torch that creates or moves a tensor."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `func` with every CUDA device among its arguments replaced and memory never pinned."""
        options = kwargs or {}
        # Nearly every call comes without either: no copy for those, since this runs for each operation of the model.
        if "device" in options or "pin_memory" in options:
            options = {name: _on_cpu(name, value) for name, value in options.items()}
        if func is torch.Tensor.to:
            args = (args[0], *(cpu_instead(value) for value in args[1:]))
        return func(*args, **options)
