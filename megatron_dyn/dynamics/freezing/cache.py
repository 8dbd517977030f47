"""What the frozen first layers of a stage gave for a micro-batch, kept for when the same micro-batch comes again.

A key is the digest of what goes into the first of them, so data that repeats is recognised on every stage. The layers are
skipped by giving each a forward of ours, on the instance; nothing else of Megatron's is touched.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import torch


class PrefixCache:
    """One per rank."""

    def __init__(self, limit_bytes: int) -> None:
        """Keep at most `limit_bytes` in host memory; the least recently used goes first."""
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._num_bytes = 0
        self._num_layers = 0
        self._layers: Mapping[int, Any] = {}
        self._key: bytes | None = None
        self._found: torch.Tensor | None = None
        self.num_hits = self.num_misses = 0

    def follow(self, layers: Mapping[int, Any], num_layers: int) -> None:
        """Layers here, by id, of which those below `num_layers` need no backward; forgets all where that is new."""
        if (tuple(layers), num_layers) != (tuple(self._layers), self._num_layers):
            self._kept.clear()
            self._num_bytes = 0
        self._layers, self._num_layers = dict(layers), num_layers

    def wrap(self, layer: int, module: torch.nn.Module) -> None:
        """Let a layer ask here before it computes."""
        original = module.forward

        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._forward(layer, original, hidden_states, args, kwargs)

        module.forward = forward

    def _forward(
        self, layer: int, original: Callable[..., Any], hidden: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if layer >= self._num_layers or hidden.requires_grad:
            return original(hidden, *args, **kwargs)
        first, last = layer - 1 not in self._layers, layer + 1 not in self._layers or layer + 1 >= self._num_layers
        if first:
            self._key = _digest(hidden)
            self._found = self._kept.get(self._key)
            if self._found is None:
                self.num_misses += 1
            else:
                self._kept.move_to_end(self._key)
                self.num_hits += 1
        if self._found is not None:
            shown = self._found.to(hidden.device, copy=True) if last else hidden
            return shown, kwargs.get("context")
        output = original(hidden, *args, **kwargs)
        if last and self._key is not None:
            self._keep(self._key, (output[0] if isinstance(output, tuple) else output).detach().to("cpu", copy=True))
        return output

    def _keep(self, key: bytes, tensor: torch.Tensor) -> None:
        self._kept[key] = tensor
        self._num_bytes += tensor.nbytes
        while self._num_bytes > self._limit_bytes:
            self._num_bytes -= self._kept.popitem(last=False)[1].nbytes


def _digest(tensor: torch.Tensor) -> bytes:
    raw = tensor.detach().contiguous().cpu().view(torch.uint8).numpy()
    return hashlib.blake2b(raw.tobytes(), digest_size=16).digest()
