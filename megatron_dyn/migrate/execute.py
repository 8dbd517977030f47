"""Stage and verify: every layer that changes its stage is copied aside on its new rank and checked. Nothing else changes.

Called by the controller on all ranks with the same Plan. What is returned still has to be voted on (rebuild).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dyn.migrate.codec import LayerState, Manifest, allocate, pack, unpack, verify
from megatron_dyn.ports import Collective, JobError, Transport
from megatron_dyn.records import Plan, Receipt


class PlanMismatch(JobError):
    """Ranks computed different plans: a bug or a broken rank. Nothing has moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """This rank's place in a move."""

    global_rank: int
    pp_rank: int
    pipeline_ranks: tuple[int, ...]
    """Global ranks by pp_rank that share this rank's tp, cp and dp coordinates: its partners in every move."""
    device: torch.device


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """What arrived on this rank, aside, by global layer id. Buffers are freed one by one as they are loaded."""

    receipt: Receipt
    states: dict[int, LayerState]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What one rank tells all others before anything moves."""

    digest: str
    problem: str | None
    manifests: Mapping[int, Manifest]


def execute(
    plan: Plan,
    seat: Seat,
    export: Callable[[int], LayerState],
    *,
    collective: Collective,
    transport: Transport,
) -> Staged:
    """Send the layers that leave this rank, stage those that arrive, verify them.

    All ranks must call. `export` gives the live state of a local layer. Raises PlanMismatch before anything moves when
    plans differ, CollectiveTimeout when a peer is gone; a bad checksum is no error here but a `problem` in the Receipt.
    """
    started = time.perf_counter()
    leaving = {move.layer: move for move in plan.moves if move.source == seat.pp_rank}
    arriving = {move.layer: move for move in plan.moves if move.destination == seat.pp_rank}
    outgoing: dict[int, tuple[Manifest, torch.Tensor]] = {}
    problem = None
    try:
        outgoing.update({layer: pack(export(layer)) for layer in leaving})
    except Exception as error:  # noqa: BLE001 - out of memory, say: the other ranks must hear of it, not wait for a send
        problem = f"packing failed: {type(error).__name__}: {error}"
    offer = Offer(digest=plan.digest, problem=problem, manifests={layer: pair[0] for layer, pair in outgoing.items()})
    offers = _agree(offer, collective)
    if any(other.problem for other in offers):
        return _nothing_moved(plan, problem, started)
    received: dict[int, tuple[Manifest, torch.Tensor]] = {}
    try:
        for layer, move in arriving.items():
            manifest = offers[seat.pipeline_ranks[move.source]].manifests[layer]
            received[layer] = (manifest, allocate(manifest, seat.device))
    except Exception as error:  # noqa: BLE001 - out of memory again, on the other side
        problem = f"making room failed: {type(error).__name__}: {error}"
    if any(collective.gather(problem, "room for the layers")):
        return _nothing_moved(plan, problem, started)
    for layer, move in leaving.items():
        transport.submit_send(outgoing[layer][1], to_rank=seat.pipeline_ranks[move.destination], tag=layer)
    for layer, (_, buffer) in received.items():
        transport.submit_receive(buffer, from_rank=seat.pipeline_ranks[arriving[layer].source], tag=layer)
    transport.run()
    problems = [problem for manifest, buffer in received.values() if (problem := _check(manifest, buffer))]
    return Staged(
        receipt=Receipt(
            plan_digest=plan.digest,
            sent_layers=tuple(leaving),
            received_layers=tuple(arriving),
            sent_bytes=sum(manifest.total_bytes for manifest, _ in outgoing.values()),
            received_bytes=sum(manifest.total_bytes for manifest, _ in received.values()),
            seconds=time.perf_counter() - started,
            problem="; ".join(problems) or None,
        ),
        states={} if problems else {layer: unpack(*pair) for layer, pair in received.items()},
    )


def _check(manifest: Manifest, buffer: torch.Tensor) -> str | None:
    try:
        return verify(manifest, buffer)
    except Exception as error:  # noqa: BLE001 - becomes this rank's no in the vote
        return f"layer {manifest.layer}: checking failed: {type(error).__name__}: {error}"


def _agree(offer: Offer, collective: Collective) -> Sequence[Offer]:
    """Every rank's offer by global rank, once all ranks are known to hold the same plan."""
    offers: list[Offer] = collective.gather(offer, "plan and manifests")
    digests: dict[str, list[int]] = {}
    for rank, other in enumerate(offers):
        digests.setdefault(other.digest, []).append(rank)
    if len(digests) != 1:
        raise PlanMismatch(f"ranks planned differently (digest: ranks): {digests}")
    return offers


def _nothing_moved(plan: Plan, problem: str | None, started: float) -> Staged:
    receipt = Receipt(
        plan_digest=plan.digest,
        sent_layers=(),
        received_layers=(),
        sent_bytes=0,
        received_bytes=0,
        seconds=time.perf_counter() - started,
        problem=problem,
    )
    return Staged(receipt=receipt, states={})
