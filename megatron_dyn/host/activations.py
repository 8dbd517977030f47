"""Weighs what the forward of one micro-batch keeps for its backward, per piece of the model.

On the CPU by the sizes of the tensors that autograd saves; on a GPU by the allocator's own counter, since hooks on saved
tensors would take away the attributes that fused kernels look for on weights. Switched on for a single micro-batch after
each change of layout, never in between.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron_dyn.measure import Slot


class ActivationMeter(ABC):
    """Bytes by slot for one micro-batch."""

    def __init__(self) -> None:
        self._bytes: dict[Slot, int] = defaultdict(int)
        self.done = False

    @property
    def bytes_by_slot(self) -> Mapping[Slot, int]:
        """What was weighed; empty before the first micro-batch."""
        return {slot: max(num_bytes, 0) for slot, num_bytes in self._bytes.items()}

    def note(self, slot: Slot) -> None:  # noqa: B027 - a meter that needs no notice is a good meter
        """Memory belonged to `slot` until now."""

    @abstractmethod
    def weighing(self, owner: Callable[[], Slot]) -> AbstractContextManager[None]:
        """Weigh what the block keeps; `owner` tells to whom it belongs at a moment."""


def activation_meter(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> ActivationMeter:
    """The meter for where the model lives."""
    return AllocatorMeter() if device.type == "cuda" else SavedTensorMeter(parameters)


class AllocatorMeter(ActivationMeter):
    """Growth of the CUDA allocator's counter. Host-side numbers: nothing waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._last: int | None = None

    def note(self, slot: Slot) -> None:
        """See ActivationMeter."""
        if self._last is not None:
            now = torch.cuda.memory_allocated()
            self._bytes[slot] += now - self._last
            self._last = now

    @contextmanager
    def weighing(self, owner: Callable[[], Slot]) -> Iterator[None]:
        """See ActivationMeter."""
        self._last = torch.cuda.memory_allocated()
        try:
            yield
        finally:
            self.note(owner())
            self._last = None
            self.done = True


class SavedTensorMeter(ActivationMeter):
    """Sizes of the storages that autograd saves, each counted once."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Storages of `parameters` are not activations and are left out."""
        super().__init__()
        self._known = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    @contextmanager
    def weighing(self, owner: Callable[[], Slot]) -> Iterator[None]:
        """See ActivationMeter."""
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._known:
                self._known.add(storage.data_ptr())
                self._bytes[owner()] += storage.nbytes()
                # Held until the block ends: a freed storage's address could come back as another tensor and be missed.
                kept.append(tensor.detach())
            # A detached alias: returning an output of the saving node itself would make a reference cycle.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self.done = True
