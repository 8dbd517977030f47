"""What ranks tell each other before anything moves, and what all of them make of it: the parcels of the move.

Everything here is a pure function of what was gathered, so that every rank sees the same parcels in the same order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from megatron_dyn.migrate.codec import Manifest, num_bytes_of
from megatron_dyn.migrate.ranges import RangeMove, Ranges, ShardKey, ShardNote, plan_ranges
from megatron_dyn.migrate.schedule import Parcel
from megatron_dyn.ports import JobError
from megatron_dyn.records import Plan

SHARDS = "optimizer shards"
"""The unit of a parcel that carries ranges; every other parcel carries a layer."""


class PlanMismatch(JobError):
    """Ranks computed different plans: a bug or a broken rank. Nothing has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This rank's place in a move."""

    global_rank: int
    pp_rank: int
    pipeline_ranks: tuple[int, ...]
    """Global ranks by pp_rank that share this rank's tp, cp, dp and ep coordinates: its partners in every move."""
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """Optimizer state of one parameter that this rank holds: the live tensors, flat; read only."""

    note: ShardNote
    tensors: Mapping[str, torch.Tensor]
    """By kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank tells all others before anything moves."""

    digest: str
    """Of the plan."""
    problem: str | None
    pipeline_ranks: tuple[int, ...]
    manifests: Mapping[int, Manifest] = field(default_factory=dict)
    """Of the layers that leave this rank."""
    notes: Mapping[ShardKey, ShardNote] = field(default_factory=dict)
    """Of the shards that this rank holds and whose stage the plan touches."""


def check_same_plan(offers: Sequence[Offer]) -> None:
    """Raise PlanMismatch unless all ranks hold the same plan; offers by global rank."""
    digests: dict[str, list[int]] = {}
    for rank, offer in enumerate(offers):
        digests.setdefault(offer.digest, []).append(rank)
    if len(digests) != 1:
        raise PlanMismatch(f"ranks planned differently (digest: ranks): {digests}")


def layer_parcels(plan: Plan, offers: Sequence[Offer]) -> list[tuple[int, Parcel]]:
    """(layer, parcel) of each layer that leaves a rank, by ascending rank and layer."""
    parcels = []
    for rank, offer in enumerate(offers):
        for move in plan.moves:
            if (manifest := offer.manifests.get(move.layer)) is not None:
                parcel = Parcel(
                    unit=f"layer {move.layer}",
                    source=rank,
                    destination=offer.pipeline_ranks[move.destination],
                    sizes=tuple(entry.num_bytes for entry in manifest.entries if entry.num_bytes),
                )
                parcels.append((move.layer, parcel))
    return parcels


def range_moves(offers: Sequence[Offer], wanted: Sequence[Ranges]) -> tuple[RangeMove, ...]:
    """The ranges that travel, given what each rank wants to hold. Raises RangeError when shards do not add up."""
    held = [{key: (note.start, note.end) for key, note in offer.notes.items()} for offer in offers]
    return plan_ranges(held, wanted)


def range_parcels(moves: Sequence[RangeMove], offers: Sequence[Offer]) -> list[tuple[Parcel, tuple[RangeMove, ...]]]:
    """One parcel for each pair of ranks, with its moves; a move has one buffer for each kind of its shard, in that order."""
    parcels = []
    for (source, destination), group in groupby(moves, key=lambda move: (move.source, move.destination)):
        members = tuple(group)
        sizes = tuple(
            num_bytes_of((move.end - move.start,), dtype)
            for move in members
            for _, dtype in offers[source].notes[move.key].kinds
        )
        parcels.append((Parcel(unit=SHARDS, source=source, destination=destination, sizes=sizes), members))
    return parcels


def all_facts(offers: Sequence[Offer]) -> dict[ShardKey, Any]:
    """What holders tell of each shard beyond its range."""
    return {key: note.facts for offer in offers for key, note in offer.notes.items()}
