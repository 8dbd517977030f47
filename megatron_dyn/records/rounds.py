"""The records that travel down the pipe: Sample, Snapshot, Move, Plan, NoChange, Receipt, Rebuilt, RoundReport.

Each stage takes some of these and returns one. They hold numbers and names only: no tensors, no groups, no clocks.
All layer ids are global and 0-based; all times are seconds per micro-batch unless the name says otherwise.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_dyn.records.layout import Layout

SCHEMA_VERSION = 1
"""Version of the JSONL lines written by the report stage; raised when a field changes meaning."""

NOTABLE_SPEED = 0.15
"""Ranks whose speeds differ by less than this fraction count as equal: timings of one layer scatter by a few percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one piece of the model (a layer, the embedding, or head and loss) costs on the rank that ran it."""

    forward_seconds: float = 0.0
    """Forward time of one micro-batch."""
    backward_seconds: float = 0.0
    """Backward time of one micro-batch, recomputation included."""
    backward_weight_seconds: float = 0.0
    """The part of `backward_seconds` that computes weight gradients; 0 where the two parts are not told apart."""
    optimizer_seconds: float = 0.0
    """Optimizer time of one step (not of a micro-batch); 0 where it is not known by piece."""
    state_bytes: int = 0
    """Parameters, gradients, main parameters and optimizer moments."""
    activation_bytes: int = 0
    """What the forward of one micro-batch keeps for its backward."""
    moved_bytes: int = 0
    """What would travel if the piece moved: parameters, buffers, main parameters and moments, without gradients."""

    @property
    def seconds(self) -> float:
        """Forward plus backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One rank's reading over its window: the median step of those sampled."""

    global_rank: int
    pp_rank: int
    iteration: int
    """The last iteration in the window."""
    num_steps: int
    """Steps in the window."""
    num_microbatches: int
    layers: tuple[tuple[int, Cost], ...]
    """(layer id, cost) of every layer on this rank, by id."""
    embedding: Cost | None
    """First stage only."""
    head: Cost | None
    """Last stage only: final norm, head, loss and the fetch of its batch."""
    other_seconds: float
    """Compute of one micro-batch that belongs to none of the above."""
    wait_seconds: float
    """Per step: time in point-to-point calls of the schedule, idle time included."""
    optimizer_seconds: float
    """Per step."""
    step_seconds: float
    """Per step, from the start of the schedule to the end of the optimizer; steps that were not sampled."""
    readings: tuple[tuple[float, ...], ...] = ()
    """By sampled step, oldest first: seconds of each of `layers` in that step alone."""
    notes: tuple[tuple[int, Mapping[str, Any]], ...] = ()
    """(layer id, what the dynamic families say on it, by family), of layers on which they say anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReading:
    """One pipeline stage in a Snapshot: over its data- and tensor-parallel replicas, the slowest counts."""

    forward_seconds: float
    backward_seconds: float
    wait_seconds: float
    optimizer_seconds: float
    state_bytes: int
    activation_bytes: int

    @property
    def seconds(self) -> float:
        """Busy time of one micro-batch."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """What the whole job measured, the same on every rank."""

    iteration: int
    layout: Layout
    layers: tuple[Cost, ...]
    """By global layer id."""
    embedding: Cost
    head: Cost
    other_seconds: float
    """Per micro-batch and stage, the largest."""
    stages: tuple[StageReading, ...]
    """By pp_rank."""
    step_seconds: float
    num_microbatches: int
    readings: tuple[tuple[float, ...], ...] = ()
    """By sampled step, oldest first: seconds of each layer, by global id, in that step alone; empty when not kept."""
    notes: tuple[Mapping[str, Any], ...] = ()
    """By global layer id: what the dynamic families say on it, by family; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Layer `layer` leaves pipeline stage `source` for `destination` (pp_ranks; equal tp, cp, dp coordinates)."""

    layer: int
    source: int
    destination: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A decided change of layout."""

    before: Layout
    after: Layout
    moves: tuple[Move, ...]
    reason: str
    predicted_before_seconds: float | None = None
    """Step time predicted for `before`; None when nothing was measured (a forced layout)."""
    predicted_after_seconds: float | None = None
    predicted_cost_seconds: float | None = None

    def touches(self, pp_rank: int) -> bool:
        """Whether the layers of any chunk of `pp_rank` change; a layer may also move between two of its own chunks."""
        return self.before.layers_by_chunk(pp_rank) != self.after.layers_by_chunk(pp_rank)

    @property
    def digest(self) -> str:
        """Equal on all ranks or nothing moves: hash of the layouts and the moves."""
        moves = ";".join(f"{move.layer}:{move.source}>{move.destination}" for move in self.moves)
        return hashlib.sha256(f"{self.before.text} {self.after.text} {moves}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChange:
    """A decision to leave the layout as it is, and why."""

    layout: Layout
    reason: str
    predicted_before_seconds: float | None = None
    predicted_after_seconds: float | None = None
    """Step time predicted for the best layout found, when there was one."""
    predicted_cost_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What one rank sent and received, staged aside and verified; nothing in the model has changed yet."""

    plan_digest: str
    sent_layers: tuple[int, ...]
    received_layers: tuple[int, ...]
    sent_bytes: int
    received_bytes: int
    seconds: float
    problem: str | None = None
    """Why this rank votes no; None when everything arrived and matched its checksum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebuilt:
    """What the rebuild did on this rank."""

    layout: Layout
    committed: bool
    problem: str | None
    """Why it was aborted (every rank's problem, joined); None when committed."""
    attached_layers: tuple[int, ...]
    detached_layers: tuple[int, ...]
    seconds: float


class Outcome(StrEnum):
    """How a round ended."""

    COMMIT = "commit"
    ABORT = "abort"
    NO_CHANGE = "no_change"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundReport:
    """One round, as written to `rounds.jsonl` (see docs/reports.md)."""

    round: int
    iteration: int
    outcome: Outcome
    reason: str
    layout_before: str
    layout_after: str
    moves: tuple[Move, ...] = ()
    snapshot: Snapshot | None = None
    speeds: tuple[float | None, ...] | None = None
    """By pp_rank, relative to the median: how fast ranks were found to be; None for a rank that cannot be told yet, or when
    no rank can."""
    shrink_advice: str | None = None
    """How many stages would do under --dyn-shrink-policy; None without a policy, or when all are needed."""
    predicted_before_seconds: float | None = None
    predicted_after_seconds: float | None = None
    predicted_cost_seconds: float | None = None
    measured_before_seconds: float | None = None
    measured_after_seconds: float | None = None
    """Median step time under `layout_after`; filled in a few steps after a commit."""
    tokens_per_step: int = 0
    moved_bytes: int = 0
    measuring_seconds: float = 0.0
    deciding_seconds: float = 0.0
    moving_seconds: float = 0.0
    """Transfer and rebuild together, the slowest rank."""
    peak_extra_bytes: int | None = None
    """Most memory that any rank needed during the move beyond what it held before; None where that cannot be seen."""
