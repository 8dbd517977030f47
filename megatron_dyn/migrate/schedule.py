"""Cuts what travels into buckets, so that no rank has more than a bucket of bytes under way at a time. Pure, no torch.

All ranks cut the same list alike. A rank works through its buckets by ascending number and never starts one before the one
before it is done: a transfer has one number for both its ends, so a wait can only be for a smaller number, never in a circle.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Buffers that leave global rank `source` for `destination` and are verified together."""

    unit: str
    """What they are, for messages: `layer 3`, or `optimizer shards`."""
    source: int
    destination: int
    sizes: tuple[int, ...]
    """Bytes of each buffer, in the order in which both ends hold them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `start` to `end` of one buffer of one parcel; they travel in bucket `bucket`."""

    bucket: int
    parcel: int
    buffer: int
    start: int
    end: int


def cut(parcels: Sequence[Parcel], bucket_bytes: int) -> tuple[Piece, ...]:
    """All parcels in pieces, by ascending bucket. In a bucket no rank sends and receives more than `bucket_bytes` in all.

    Raises ValueError for a bucket that can hold nothing.
    """
    if bucket_bytes < 1:
        raise ValueError(f"bucket_bytes: expected at least 1, got {bucket_bytes}")
    current: dict[int, int] = defaultdict(int)
    filled: dict[int, int] = defaultdict(int)
    pieces = []
    for index, parcel in enumerate(parcels):
        ends = (parcel.source, parcel.destination)
        for buffer, size in enumerate(parcel.sizes):
            start = 0
            while start < size:
                bucket = max(current[rank] for rank in ends)
                room = bucket_bytes - max(filled[rank] if current[rank] == bucket else 0 for rank in ends)
                if room == 0:
                    bucket, room = bucket + 1, bucket_bytes
                end = min(size, start + room)
                for rank in ends:
                    if current[rank] != bucket:
                        current[rank], filled[rank] = bucket, 0
                    filled[rank] += end - start
                pieces.append(Piece(bucket, index, buffer, start, end))
                start = end
    return tuple(sorted(pieces, key=lambda piece: piece.bucket))
