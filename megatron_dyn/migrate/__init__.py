"""Migrate: the only stage with tensors. Layers travel whole, are staged aside and verified; nothing is changed here."""

from megatron_dyn.migrate.codec import CodecError, Entry, Key, LayerState, Manifest, allocate, describe, digest, flat_bytes
from megatron_dyn.migrate.execute import DEFAULT_BUCKET_BYTES, Source, Staged, execute
from megatron_dyn.migrate.offer import PlanMismatch, Seat, Shard
from megatron_dyn.migrate.ranges import RangeError, RangeMove, Ranges, ShardKey, ShardNote, plan_ranges
from megatron_dyn.migrate.schedule import Parcel, Piece, cut
from megatron_dyn.migrate.transport import MemoryTransport, ProcessGroupTransport

__all__ = [
    "CodecError",
    "DEFAULT_BUCKET_BYTES",
    "Entry",
    "Key",
    "LayerState",
    "Manifest",
    "MemoryTransport",
    "Parcel",
    "Piece",
    "PlanMismatch",
    "ProcessGroupTransport",
    "RangeError",
    "RangeMove",
    "Ranges",
    "Seat",
    "Shard",
    "ShardKey",
    "ShardNote",
    "Source",
    "Staged",
    "allocate",
    "cut",
    "describe",
    "digest",
    "execute",
    "flat_bytes",
    "plan_ranges",
]
