"""Stage and verify: every layer that changes its stage is copied aside on its new rank and checked. Nothing else changes.

Called by the controller on all ranks with the same Plan. What is returned still has to be voted on (rebuild).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_dyn.migrate.codec import LayerState, Manifest, allocate, describe, digest, flat_bytes
from megatron_dyn.ports import Collective, JobError, Transport
from megatron_dyn.records import Move, Plan, Receipt

_MAX_TENSORS = 1 << 12
"""More tensors than a layer has; tags of different layers must not meet."""


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
    """What arrived on this rank, aside, by global layer id. Its tensors become the layer's own; they are not copied again."""

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
    outgoing: dict[int, LayerState] = {}
    problem = None
    try:
        outgoing.update({layer: export(layer) for layer in leaving})
    except Exception as error:  # noqa: BLE001 - the other ranks must hear of it, not wait for a send
        problem = f"export failed: {type(error).__name__}: {error}"
    manifests = {layer: describe(state) for layer, state in outgoing.items()}
    offers = _agree(Offer(digest=plan.digest, problem=problem, manifests=manifests), collective)
    if any(offer.problem for offer in offers):
        return _nothing_moved(plan, problem, started)
    incoming: dict[int, LayerState] = {}
    try:
        for layer, move in arriving.items():
            incoming[layer] = allocate(offers[seat.pipeline_ranks[move.source]].manifests[layer], seat.device)
    except Exception as error:  # noqa: BLE001 - out of memory, say
        problem = f"making room failed: {type(error).__name__}: {error}"
    if any(collective.gather(problem, "room for the layers")):
        return _nothing_moved(plan, problem, started)
    for layer, state in outgoing.items():
        _submit(transport.submit_send, state, "to_rank", seat.pipeline_ranks[leaving[layer].destination])
    for layer, state in incoming.items():
        _submit(transport.submit_receive, state, "from_rank", seat.pipeline_ranks[arriving[layer].source])
    sent: dict[int, int | str] = {}
    # The digests of what leaves are made while it is under way.
    transport.run(meanwhile=lambda: sent.update(_digests(outgoing)))
    problem = _compare(incoming, collective.gather(sent, "digests of the layers"), seat, arriving)
    return Staged(
        receipt=Receipt(
            plan_digest=plan.digest,
            sent_layers=tuple(leaving),
            received_layers=tuple(arriving),
            sent_bytes=sum(manifest.num_bytes for manifest in manifests.values()),
            received_bytes=sum(describe(state).num_bytes for state in incoming.values()),
            seconds=time.perf_counter() - started,
            problem=problem,
        ),
        states={} if problem else incoming,
    )


def _submit(submit: Callable[..., None], state: LayerState, side: str, rank: int) -> None:
    """Queue every tensor of a layer. Both ends go through the same manifest, so the order agrees, as NCCL needs it."""
    for index, buffer in enumerate(flat_bytes(state)):
        submit(buffer, **{side: rank}, tag=state.layer * _MAX_TENSORS + index)


def _digests(states: Mapping[int, LayerState]) -> dict[int, int | str]:
    """The digest of every layer, or why there is none: the ranks that wait for it must hear of a failure."""
    digests: dict[int, int | str] = {}
    for layer, state in states.items():
        try:
            digests[layer] = digest(state)
        except Exception as error:  # noqa: BLE001 - becomes a no in the vote
            digests[layer] = f"checking failed: {type(error).__name__}: {error}"
    return digests


def _compare(
    incoming: Mapping[int, LayerState], sent: Sequence[Mapping[int, int | str]], seat: Seat, arriving: Mapping[int, Move]
) -> str | None:
    """None when every layer arrived as it was sent, else one line that names those that did not."""
    problems = []
    for layer, actual in _digests(incoming).items():
        source = seat.pipeline_ranks[arriving[layer].source]
        expected = sent[source][layer]
        if isinstance(actual, str):
            problems.append(f"layer {layer}: {actual}")
        elif isinstance(expected, str):
            problems.append(f"layer {layer}: {expected} (on rank {source}, which sent it)")
        elif actual != expected:
            problems.append(f"layer {layer}: checksum differs, expected {expected:#x}, got {actual:#x}")
    return "; ".join(problems) or None


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
