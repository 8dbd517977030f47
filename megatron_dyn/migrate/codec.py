"""One layer's whole state <-> a manifest and one flat byte buffer.

Whole state = parameters, buffers (persistent or not), extra state, fp32 main parameters, every optimizer tensor and scalar,
`requires_grad`. The codec knows tensors and names, not Megatron: the host exports and loads a `LayerState`.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_ALIGNMENT_BYTES = 64
"""Tensors start at multiples of this in the buffer, so that any dtype can be viewed in place."""
_CHECKSUM_CHUNK = 1 << 22


class CodecError(RuntimeError):
    """A buffer or state that does not fit its manifest; the message names layer, tensor, expected and actual."""


@dataclass(frozen=True, slots=True)
class Key:
    """Names one tensor of a layer."""

    kind: str
    """`parameter`, `buffer`, `extra`, `main`, or `optimizer:<state name>`."""
    name: str
    """Name within the layer, for example `self_attention.linear_qkv.weight`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """Everything a layer is, detached from model and optimizer. Tensors may be views of live state: read only."""

    layer: int
    tensors: Mapping[Key, torch.Tensor]
    scalars: Mapping[str, Any] = field(default_factory=dict)
    """Small plain values: optimizer group of each parameter, steps kept as numbers, `requires_grad`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Where one tensor lies in the buffer."""

    key: Key
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What travels for one layer. Small and picklable: every rank gets every manifest before any buffer moves."""

    layer: int
    entries: tuple[Entry, ...]
    scalars: Mapping[str, Any]
    total_bytes: int
    checksum: int


def pack(state: LayerState) -> tuple[Manifest, torch.Tensor]:
    """The manifest and a uint8 buffer [total_bytes] on the device of the state, holding a copy of every tensor."""
    entries, offset = [], 0
    for key, tensor in state.tensors.items():
        num_bytes = tensor.numel() * tensor.element_size()
        entries.append(Entry(key=key, dtype=_dtype_name(tensor), shape=tuple(tensor.shape), offset=offset, num_bytes=num_bytes))
        offset += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    device = next((tensor.device for tensor in state.tensors.values() if tensor.is_cuda), torch.device("cpu"))
    buffer = torch.zeros(offset, dtype=torch.uint8, device=device)
    for entry, tensor in zip(entries, state.tensors.values(), strict=True):
        _view(buffer, entry).copy_(tensor)
    manifest = Manifest(
        layer=state.layer,
        entries=tuple(entries),
        scalars=dict(state.scalars),
        total_bytes=offset,
        checksum=checksum(buffer),
    )
    return manifest, buffer


def allocate(manifest: Manifest, device: torch.device) -> torch.Tensor:
    """An empty buffer for what `manifest` announces."""
    return torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device)


def verify(manifest: Manifest, buffer: torch.Tensor) -> str | None:
    """None when `buffer` is what was sent, else one line that says what differs."""
    if buffer.numel() != manifest.total_bytes:
        return f"layer {manifest.layer}: expected {manifest.total_bytes} bytes, got {buffer.numel()}"
    if (actual := checksum(buffer)) != manifest.checksum:
        return f"layer {manifest.layer}: checksum differs, expected {manifest.checksum:#x}, got {actual:#x}"
    return None


def unpack(manifest: Manifest, buffer: torch.Tensor) -> LayerState:
    """The state whose tensors are views into `buffer`; copy what must outlive it."""
    return LayerState(
        layer=manifest.layer,
        tensors={entry.key: _view(buffer, entry) for entry in manifest.entries},
        scalars=manifest.scalars,
    )


def checksum(buffer: torch.Tensor) -> int:
    """A digest of a uint8 buffer, equal for equal bytes on any rank with the same kind of device.

    CPU: CRC-32, without a copy. GPU: position-weighted sums of 32-bit words, computed in chunks so that the extra memory
    stays small; the whole buffer is never brought to the host.
    """
    if not buffer.is_cuda:
        return zlib.crc32(memoryview(buffer.numpy()))
    words = buffer.view(torch.int32)
    total = torch.zeros(2, dtype=torch.int64, device=buffer.device)
    for start in range(0, words.numel(), _CHECKSUM_CHUNK):
        chunk = words[start : start + _CHECKSUM_CHUNK].to(torch.int64)
        weights = torch.arange(start, start + chunk.numel(), device=buffer.device, dtype=torch.int64) % 65521 + 1
        total += torch.stack((chunk.sum(), (chunk * weights).sum()))
    low, high = total.tolist()
    return int(low * 0x9E3779B97F4A7C15 + high) & 0xFFFFFFFFFFFFFFFF


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    dtype = getattr(torch, entry.dtype)
    flat = buffer[entry.offset : entry.offset + entry.num_bytes]
    expected = torch.Size(entry.shape).numel() * dtype.itemsize
    if flat.numel() != expected:
        raise CodecError(f"{entry.key.kind} {entry.key.name}: expected {expected} bytes, got {flat.numel()}")
    return flat.view(dtype).view(entry.shape)
