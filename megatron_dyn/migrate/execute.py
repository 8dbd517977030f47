"""Stage and verify: all that changes its owner is copied aside on its new rank and checked. Nothing else changes.

Called by the controller on all ranks with the same Plan. What is returned still has to be voted on (rebuild). Two things
travel: whole layers, between ranks of equal tp, cp, dp and ep coordinates; and, with a distributed optimizer, flat ranges of
its state between whichever ranks own them before and after.
"""

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

import torch

from megatron_dyn.migrate.codec import (
    CodecError,
    LayerState,
    Manifest,
    allocate,
    as_bytes,
    describe,
    digest,
    dtype_of,
    flat_bytes,
)
from megatron_dyn.migrate.offer import (
    Offer,
    Seat,
    Shard,
    all_facts,
    check_same_plan,
    layer_parcels,
    range_moves,
    range_parcels,
)
from megatron_dyn.migrate.ranges import RangeMove, Ranges, ShardKey
from megatron_dyn.migrate.schedule import Parcel, Piece, cut
from megatron_dyn.ports import Collective, Transport
from megatron_dyn.records import Plan, Receipt

DEFAULT_BUCKET_BYTES = 1 << 28
"""What a rank has under way at a time, unless told otherwise."""


class Source(Protocol):
    """What leaves a rank, described and given out by the host. All tensors are live: read only."""

    def quiesce(self) -> None:
        """Finish what the host still does in the background with parameters and state. All ranks, before anything else."""

    def export(self, layer: int) -> LayerState:
        """The whole state of a local layer, but for optimizer state that is sharded."""

    def shards(self, plan: Plan) -> Mapping[ShardKey, Shard]:
        """The sharded optimizer state on this rank, where `plan` touches its stage; else nothing."""

    def outline(self, plan: Plan, arriving: Mapping[int, Manifest]) -> Ranges:
        """What this rank will hold of sharded optimizer state after `plan`, given the layers that arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What arrived on this rank, aside. Its tensors become the layer's and the optimizer's own."""

    receipt: Receipt
    states: dict[int, LayerState] = field(default_factory=dict)
    """By global layer id."""
    ranges: dict[ShardKey, list[tuple[int, dict[str, torch.Tensor]]]] = field(default_factory=dict)
    """(first element, tensor by kind) of each range that arrived."""
    wanted: Ranges = field(default_factory=dict)
    """What this rank will hold of sharded optimizer state."""
    facts: Mapping[ShardKey, Any] = field(default_factory=dict)
    """What the holders of shards told of them."""

    @classmethod
    def nothing(cls) -> "Staged":
        """Before the first move, and after each."""
        return cls(
            receipt=Receipt(plan_digest="", sent_layers=(), received_layers=(), sent_bytes=0, received_bytes=0, seconds=0.0)
        )


def execute(
    plan: Plan,
    seat: Seat,
    source: Source,
    *,
    collective: Collective,
    transport: Transport,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Staged:
    """Send what leaves this rank, stage what arrives, verify it; at most `bucket_bytes` of a rank are under way at a time.

    All ranks must call. Raises PlanMismatch before anything moves when plans differ, CollectiveTimeout when a peer is gone;
    a bad checksum is no error here but a `problem` in the Receipt.
    """
    return _Move(plan, seat, source, collective, transport, bucket_bytes).run()


class _Move:
    """One move on one rank."""

    def __init__(
        self, plan: Plan, seat: Seat, source: Source, collective: Collective, transport: Transport, bucket_bytes: int
    ) -> None:
        self._plan, self._seat, self._source = plan, seat, source
        self._collective, self._transport, self._bucket_bytes = collective, transport, bucket_bytes
        self._started = time.perf_counter()
        self._problem: str | None = None
        self._outgoing: dict[int, LayerState] = {}
        self._held: dict[ShardKey, Shard] = {}
        self._incoming: dict[int, LayerState] = {}
        self._ranges: dict[ShardKey, list[tuple[int, dict[str, torch.Tensor]]]] = defaultdict(list)
        self._parcels: list[Parcel] = []
        self._buffers: dict[int, list[torch.Tensor]] = {}
        """By parcel, of those that this rank sends or receives."""

    def run(self) -> Staged:
        """See `execute`."""
        offers = self._offer()
        if any(offer.problem for offer in offers):
            return self._nothing_moved()
        wanted: list[Ranges] = []
        for problem, ranges in self._want(offers):
            wanted.append(ranges)
            if problem is not None:
                return self._nothing_moved()
        if any(self._make_room(offers, wanted)):
            return self._nothing_moved()
        sent: dict[int, int | str] = {}
        self._transfer(sent)
        mine = [index for index in self._buffers if self._parcels[index].destination == self._seat.global_rank]
        self._problem = self._compare(mine, self._collective.gather(sent, "digests of what was sent"))
        if self._problem:
            return self._nothing_moved()
        return Staged(
            receipt=self._receipt(tuple(self._outgoing), tuple(self._incoming)),
            states=self._incoming,
            ranges=dict(self._ranges),
            wanted=wanted[self._seat.global_rank],
            facts=all_facts(offers),
        )

    def _offer(self) -> Sequence[Offer]:
        """Tell what leaves; hear what leaves elsewhere."""
        try:
            self._source.quiesce()
            leaving = [move.layer for move in self._plan.moves if move.source == self._seat.pp_rank]
            self._outgoing.update({layer: self._source.export(layer) for layer in leaving})
            self._held.update(self._source.shards(self._plan))
            for state in self._outgoing.values():
                _check_device(state, self._seat.device)
        except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, not wait for a send
            self._problem = f"export failed: {type(error).__name__}: {error}"
        offer = Offer(
            digest=self._plan.digest,
            problem=self._problem,
            pipeline_ranks=self._seat.pipeline_ranks,
            manifests={layer: describe(state) for layer, state in self._outgoing.items()},
            notes={key: shard.note for key, shard in self._held.items()},
        )
        offers: list[Offer] = self._collective.gather(offer, "plan and manifests")
        check_same_plan(offers)
        return offers

    def _arriving(self, offers: Sequence[Offer]) -> dict[int, Manifest]:
        return {
            move.layer: offers[self._seat.pipeline_ranks[move.source]].manifests[move.layer]
            for move in self._plan.moves
            if move.destination == self._seat.pp_rank
        }

    def _want(self, offers: Sequence[Offer]) -> list[tuple[str | None, Ranges]]:
        """(problem, what it wants to hold of sharded state) of every rank."""
        wanted: Ranges = {}
        try:
            wanted = self._source.outline(self._plan, self._arriving(offers))
        except Exception as error:  # noqa: BLE001 - becomes a no
            self._problem = f"planning the optimizer's shards failed: {type(error).__name__}: {error}"
        return self._collective.gather((self._problem, wanted), "shards of the optimizer")

    def _make_room(self, offers: Sequence[Offer], wanted: Sequence[Ranges]) -> list[str | None]:
        """Lay out all parcels and allocate what arrives here; every rank's problem, None where there is none."""
        try:
            for layer, manifest in self._arriving(offers).items():
                self._incoming[layer] = allocate(manifest, self._seat.device)
            for layer, parcel in layer_parcels(self._plan, offers):
                self._add(parcel, self._layer_buffers(layer, parcel))
            for parcel, moves in range_parcels(range_moves(offers, wanted), offers):
                self._add(parcel, self._range_buffers(moves, parcel, offers))
        except Exception as error:  # noqa: BLE001 - out of memory, say
            self._problem = f"making room failed: {type(error).__name__}: {error}"
        return self._collective.gather(self._problem, "room for what arrives")

    def _add(self, parcel: Parcel, buffers: list[torch.Tensor] | None) -> None:
        if buffers is not None:
            self._buffers[len(self._parcels)] = buffers
        self._parcels.append(parcel)

    def _layer_buffers(self, layer: int, parcel: Parcel) -> list[torch.Tensor] | None:
        """This rank's end of a layer that moves; None when it has no part in it."""
        if parcel.source == self._seat.global_rank:
            return flat_bytes(self._outgoing[layer])
        return flat_bytes(self._incoming[layer]) if parcel.destination == self._seat.global_rank else None

    def _range_buffers(self, moves: Sequence[RangeMove], parcel: Parcel, offers: Sequence[Offer]) -> list[torch.Tensor] | None:
        """This rank's end of ranges that move; None when it has no part in them."""
        buffers = []
        for move in moves:
            note = offers[move.source].notes[move.key]
            if parcel.source == self._seat.global_rank:
                live, borders = self._held[move.key].tensors, slice(move.start - note.start, move.end - note.start)
                tensors = {kind: live[kind][borders] for kind, _ in note.kinds}
            elif parcel.destination == self._seat.global_rank:
                tensors = {
                    kind: torch.empty(move.end - move.start, dtype=dtype_of(dtype), device=self._seat.device)
                    for kind, dtype in note.kinds
                }
                self._ranges[move.key].append((move.start, tensors))
            else:
                return None
            buffers += [as_bytes(tensors[kind]) for kind, _ in note.kinds]
        return buffers

    def _transfer(self, sent: dict[int, int | str]) -> None:
        """Bucket by bucket. Digests of what leaves are made while the first is under way."""
        leaving = [index for index in self._buffers if self._parcels[index].source == self._seat.global_rank]
        pieces = [piece for piece in enumerate(cut(self._parcels, self._bucket_bytes)) if piece[1].parcel in self._buffers]
        first = True
        for _, bucket in groupby(pieces, key=lambda numbered: numbered[1].bucket):
            for tag, piece in bucket:
                self._submit(piece, tag)
            if first:
                self._transport.run(meanwhile=lambda: sent.update(self._digests(leaving)))
            else:
                self._transport.run()
            first = False
        if first:
            # Parcels without a byte: their receivers compare digests all the same.
            sent.update(self._digests(leaving))

    def _submit(self, piece: Piece, tag: int) -> None:
        """Queue one piece. Both ends go through the same list, so the order agrees, as NCCL needs it."""
        parcel = self._parcels[piece.parcel]
        buffer = self._buffers[piece.parcel][piece.buffer][piece.start : piece.end]
        if parcel.source == self._seat.global_rank:
            self._transport.submit_send(buffer, to_rank=parcel.destination, tag=tag)
        else:
            self._transport.submit_receive(buffer, from_rank=parcel.source, tag=tag)

    def _digests(self, parcels: Sequence[int]) -> dict[int, int | str]:
        """The digest of every parcel, or why there is none: the ranks that wait for it must hear of a failure."""
        digests: dict[int, int | str] = {}
        for index in parcels:
            try:
                digests[index] = digest(self._buffers[index])
            except Exception as error:  # noqa: BLE001 - becomes a no in the vote
                digests[index] = f"checking failed: {type(error).__name__}: {error}"
        return digests

    def _compare(self, arrived: Sequence[int], sent: Sequence[Mapping[int, int | str]]) -> str | None:
        """None when every parcel arrived as it was sent, else one line that names those that did not."""
        problems = []
        for index, actual in self._digests(arrived).items():
            unit, source = self._parcels[index].unit, self._parcels[index].source
            expected = sent[source][index]
            if isinstance(actual, str):
                problems.append(f"{unit}: {actual}")
            elif isinstance(expected, str):
                problems.append(f"{unit}: {expected} (on rank {source}, which sent it)")
            elif actual != expected:
                problems.append(f"{unit} from rank {source}: checksum differs, expected {expected:#x}, got {actual:#x}")
        return "; ".join(problems) or None

    def _receipt(self, sent_layers: tuple[int, ...], received_layers: tuple[int, ...]) -> Receipt:
        rank, done = self._seat.global_rank, not self._problem
        return Receipt(
            plan_digest=self._plan.digest,
            sent_layers=sent_layers,
            received_layers=received_layers,
            sent_bytes=sum(sum(parcel.sizes) for parcel in self._parcels if done and parcel.source == rank),
            received_bytes=sum(sum(parcel.sizes) for parcel in self._parcels if done and parcel.destination == rank),
            seconds=time.perf_counter() - self._started,
            problem=self._problem,
        )

    def _nothing_moved(self) -> Staged:
        self._parcels.clear()
        return Staged(receipt=self._receipt((), ()))


def _check_device(state: LayerState, device: torch.device) -> None:
    """Raise CodecError for a tensor that is not where the transport carries from: on NCCL it would fail half-way."""
    for key, tensor in state.tensors.items():
        if tensor.device.type != device.type:
            raise CodecError(f"layer {state.layer}: {key.kind} {key.name}: expected on {device.type}, is on {tensor.device}")
