"""Migrate: the only stage with tensors. Layers travel whole, are staged aside and verified; nothing is changed here."""

from megatron_dyn.migrate.codec import CodecError, Entry, Key, LayerState, Manifest, allocate, describe, digest, flat_bytes
from megatron_dyn.migrate.execute import PlanMismatch, Seat, Staged, execute
from megatron_dyn.migrate.transport import MemoryTransport, ProcessGroupTransport

__all__ = [
    "CodecError",
    "Entry",
    "Key",
    "LayerState",
    "Manifest",
    "MemoryTransport",
    "PlanMismatch",
    "ProcessGroupTransport",
    "Seat",
    "Staged",
    "allocate",
    "describe",
    "digest",
    "execute",
    "flat_bytes",
]
