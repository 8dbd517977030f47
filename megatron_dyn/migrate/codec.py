"""One layer's whole state, and what travels of it: a manifest of its tensors, and a digest of their bytes.

Whole state = parameters, buffers (persistent or not), extra state, fp32 main parameters, every optimizer tensor and
scalar, `requires_grad`. Tensors travel as they are: nothing is packed on the one side and what arrives on the other side
becomes the layer, so that a move holds the state of the layers in flight once. The codec knows tensors and names, not
Megatron: the host exports and loads a `LayerState`.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ROW_WORDS = 1 << 13
"""Words in a row of what a digest on the CPU sums; smaller tensors are digested byte by byte."""
_CHUNK_BYTES = 1 << 22
"""Bytes that a digest on a GPU widens at a time."""


class CodecError(RuntimeError):
    """A state that does not fit; the message names layer, tensor, expected and actual."""


@dataclass(frozen=True, slots=True)
class Key:
    """Names one tensor of a layer."""

    kind: str
    """`parameter`, `buffer`, `extra`, `main`, or `optimizer:<state name>`."""
    name: str
    """Name within the layer, for example `self_attention.linear_qkv.weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """Everything a layer is, detached from model and optimizer. On the rank it leaves, the live tensors: read only."""

    layer: int
    tensors: Mapping[Key, torch.Tensor]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Small plain values: optimizer group of each parameter, steps kept as numbers, `requires_grad`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a manifest."""

    key: Key
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return num_bytes_of(self.shape, self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What travels for one layer, in this order. Small and picklable: all ranks get all manifests before a tensor moves."""

    layer: int
    entries: tuple[Entry, ...]
    scalars: Mapping[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.num_bytes for entry in self.entries)


def num_bytes_of(shape: tuple[int, ...], dtype: str) -> int:
    """Bytes of a tensor of this shape and dtype, the latter by its name in torch."""
    return int(torch.Size(shape).numel() * dtype_of(dtype).itemsize)


def describe(state: LayerState) -> Manifest:
    """The manifest of `state`. Reads no tensor data."""
    entries = (
        Entry(key=key, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for key, tensor in state.tensors.items()
    )
    return Manifest(layer=state.layer, entries=tuple(entries), scalars=dict(state.scalars))


def allocate(manifest: Manifest, device: torch.device) -> LayerState:
    """A state of the announced shapes with undefined values, to be filled by a transport."""
    tensors = {entry.key: torch.empty(entry.shape, dtype=dtype_of(entry.dtype), device=device) for entry in manifest.entries}
    return LayerState(layer=manifest.layer, tensors=tensors, scalars=manifest.scalars)


def flat_bytes(state: LayerState) -> list[torch.Tensor]:
    """The tensors of `state` as flat uint8 buffers, in manifest order, without the empty ones.

    They share memory with the state, but for a tensor that is not contiguous, which is copied: fine for sending, and what is
    received into comes from `allocate`.
    """
    return [as_bytes(tensor) for tensor in state.tensors.values() if tensor.numel()]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A flat uint8 view, or copy where `tensor` is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(buffers: Iterable[torch.Tensor]) -> int:
    """A digest of the bytes of flat buffers, equal on two ranks (of one kind of device) if and, but for chance, only then.

    CPU: CRC-32 over the sums of rows and of columns of 64-bit words, which is twice as fast as over the bytes and notices
    any changed word and any two that changed places. GPU: position-weighted sums, in chunks so that the extra memory
    stays small; the tensors are never brought to the host.
    """
    value = 0
    for buffer in buffers:
        value = _device_digest(buffer, value) if buffer.is_cuda else _host_digest(buffer.numpy(), value)
    return value


def _host_digest(data: "npt.NDArray[np.uint8]", value: int) -> int:
    whole = len(data) // (8 * _ROW_WORDS) * (8 * _ROW_WORDS)
    if whole:
        words = data[:whole].view(np.uint64).reshape(-1, _ROW_WORDS)
        for axis in (0, 1):
            value = zlib.crc32(np.add.reduce(words, axis=axis), value)
    return zlib.crc32(data[whole:], value)


def _device_digest(buffer: torch.Tensor, start_value: int) -> int:
    total = torch.zeros(2, dtype=torch.int64, device=buffer.device)
    for start in range(0, buffer.numel(), _CHUNK_BYTES):
        chunk = buffer[start : start + _CHUNK_BYTES].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=buffer.device, dtype=torch.int64) % 65521 + 1
        total += torch.stack((chunk.sum(), (chunk * weights).sum()))
    low, high = total.tolist()
    return int((start_value * 31 + low) * 0x9E3779B97F4A7C15 + high) & 0xFFFFFFFFFFFFFFFF


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of this name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype
