"""From slots to a Sample on one rank, and from all ranks' Samples to the one Snapshot that every rank shares.

Both directions are pure. Over replicas of a stage the largest reading counts: a stage is as slow as its slowest replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dyn.measure.recorder import Kind, Slot
from megatron_dyn.measure.window import Window
from megatron_dyn.ports import JobError
from megatron_dyn.records import Cost, Layout, Sample, Snapshot, StageReading


class AssembleError(JobError):
    """Samples that do not make one Snapshot; the message names rank and layer, expected and actual."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a rank stands and what its stage holds."""

    global_rank: int
    pp_rank: int
    layers: tuple[int, ...]
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Bytes of the pieces on this rank, times left at zero."""

    layers: Mapping[int, Cost]
    embedding: Cost
    head: Cost
    notes: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What the dynamic families say on the layers here."""


def make_sample(position: Position, window: Window, footprint: Footprint, *, iteration: int, step_seconds: float) -> Sample:
    """One rank's Sample from its window (of at least one reading): medians per step, and each step's layers."""
    medians, num_microbatches = window.medians(), window.num_microbatches

    def seconds_of(seconds: Mapping[Slot, float], kind: Kind, layer: int = -1) -> tuple[float, float]:
        forward, backward = (seconds.get(Slot(kind, layer, side), 0.0) / num_microbatches for side in (False, True))
        return forward, backward

    def timed(cost: Cost, kind: Kind, layer: int = -1) -> Cost:
        forward, backward = seconds_of(medians, kind, layer)
        return replace(cost, forward_seconds=forward, backward_seconds=backward)

    return Sample(
        global_rank=position.global_rank,
        pp_rank=position.pp_rank,
        iteration=iteration,
        num_steps=len(window),
        num_microbatches=num_microbatches,
        layers=tuple((layer, timed(footprint.layers[layer], Kind.LAYER, layer)) for layer in position.layers),
        embedding=timed(footprint.embedding, Kind.EMBEDDING) if position.has_embedding else None,
        head=timed(footprint.head, Kind.HEAD) if position.has_head else None,
        other_seconds=sum(seconds_of(medians, Kind.OTHER)),
        wait_seconds=medians.get(Slot(Kind.WAIT), 0.0),
        optimizer_seconds=medians.get(Slot(Kind.OPTIMIZER), 0.0),
        step_seconds=step_seconds,
        readings=tuple(
            tuple(sum(seconds_of(reading.seconds, Kind.LAYER, layer)) for layer in position.layers) for reading in window
        ),
        notes=tuple(footprint.notes.items()),
    )


def assemble(samples: Sequence[Sample], layout: Layout) -> Snapshot:
    """The Snapshot of all ranks' samples (any order; same result on every rank).

    Raises AssembleError when a layer is missing, is on a stage that `layout` does not give it, or when ranks measured
    different numbers of micro-batches or different iterations.
    """
    for name in ("iteration", "num_microbatches"):
        ranks: dict[int, list[int]] = {}
        for sample in samples:
            ranks.setdefault(getattr(sample, name), []).append(sample.global_rank)
        if len(ranks) != 1:
            told = "; ".join(f"{value} on ranks {sorted(where)}" for value, where in sorted(ranks.items()))
            raise AssembleError(f"ranks measured different {name}: {told}")
    if missing_stages := sorted(set(range(layout.num_stages)) - {sample.pp_rank for sample in samples}):
        raise AssembleError(f"no rank measured stages {missing_stages} of layout {layout.text!r}")
    layers = [Cost()] * layout.num_layers
    for sample in samples:
        expected = layout.layers_of_stage(sample.pp_rank)
        actual = tuple(layer for layer, _ in sample.layers)
        if actual != expected:
            raise AssembleError(
                f"rank {sample.global_rank} (stage {sample.pp_rank}) measured layers {list(actual)}, "
                f"the layout {layout.text!r} gives it {list(expected)}"
            )
        for layer, cost in sample.layers:
            layers[layer] = _largest([cost, layers[layer]])
    return Snapshot(
        iteration=samples[0].iteration,
        layout=layout,
        layers=tuple(layers),
        embedding=_largest([sample.embedding for sample in samples if sample.embedding]),
        head=_largest([sample.head for sample in samples if sample.head]),
        other_seconds=max(sample.other_seconds for sample in samples),
        stages=tuple(
            _read_stage([sample for sample in samples if sample.pp_rank == pp_rank]) for pp_rank in range(layout.num_stages)
        ),
        step_seconds=max(sample.step_seconds for sample in samples),
        num_microbatches=samples[0].num_microbatches,
        readings=_readings(samples, layout.num_layers),
        notes=_notes(samples, layout.num_layers),
    )


def _readings(samples: Sequence[Sample], num_layers: int) -> tuple[tuple[float, ...], ...]:
    """[sampled steps][layers]: the slowest replica of each layer in each step, as far back as all ranks have readings."""
    num_steps = min(len(sample.readings) for sample in samples)
    steps = []
    for back in range(num_steps, 0, -1):
        seconds = [0.0] * num_layers
        for sample in samples:
            for (layer, _), value in zip(sample.layers, sample.readings[-back], strict=True):
                seconds[layer] = max(seconds[layer], value)
        steps.append(tuple(seconds))
    return tuple(steps)


def _notes(samples: Sequence[Sample], num_layers: int) -> tuple[Mapping[str, Any], ...]:
    """By layer: what its replica with the lowest rank says; empty when nobody says anything."""
    told: dict[int, Mapping[str, Any]] = {}
    for sample in sorted(samples, key=lambda sample: -sample.global_rank):
        told |= dict(sample.notes)
    return tuple(told.get(layer, {}) for layer in range(num_layers)) if told else ()


def _largest(costs: Sequence[Cost]) -> Cost:
    """Field by field, the largest over replicas."""
    return Cost(
        forward_seconds=max((cost.forward_seconds for cost in costs), default=0.0),
        backward_seconds=max((cost.backward_seconds for cost in costs), default=0.0),
        state_bytes=max((cost.state_bytes for cost in costs), default=0),
        activation_bytes=max((cost.activation_bytes for cost in costs), default=0),
        moved_bytes=max((cost.moved_bytes for cost in costs), default=0),
    )


def _read_stage(replicas: Sequence[Sample]) -> StageReading:
    """The slowest replica of one stage, by busy time."""

    def pieces(sample: Sample) -> list[Cost]:
        return [cost for _, cost in sample.layers] + [cost for cost in (sample.embedding, sample.head) if cost]

    def slowness(sample: Sample) -> tuple[float, int]:
        # The rank breaks ties, so that the order of the samples does not matter.
        return sum(cost.seconds for cost in pieces(sample)) + sample.other_seconds, sample.global_rank

    slowest = max(replicas, key=slowness)
    costs = pieces(slowest)
    return StageReading(
        forward_seconds=sum(cost.forward_seconds for cost in costs) + slowest.other_seconds,
        backward_seconds=sum(cost.backward_seconds for cost in costs),
        wait_seconds=slowest.wait_seconds,
        optimizer_seconds=max(sample.optimizer_seconds for sample in replicas),
        state_bytes=sum(cost.state_bytes for cost in costs),
        activation_bytes=sum(cost.activation_bytes for cost in costs),
    )
