"""A freeze schedule played through: at every step that changes costs, the plan, whether to move, and what is rebuilt. Pure.

It must not know files or consoles. That a frozen prefix computes no backward is taken for granted here: in Megatron the
schedule has to be told.
"""

from dataclasses import dataclass, replace

from megatron_dyn.cli.freeze import frozen_costs
from megatron_dyn.config import DecideConfig
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule
from megatron_dyn.plan import MoveHistory, decide
from megatron_dyn.plan.workload import Workload
from megatron_dyn.records import Cost, Layout, NoChange, Plan, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class FreezeRound:
    """One step at which layers freeze or train again."""

    step: int
    """Iterations finished by then."""
    frozen: tuple[int, ...]
    """Layers that are frozen from here on."""
    newly_frozen: tuple[int, ...]
    newly_trained: tuple[int, ...]
    costs: tuple[Cost, ...]
    """By layer, from here on."""
    stage_seconds_before: tuple[float, ...]
    """By pp_rank, of one micro-batch, with the new costs at the old layout."""
    stage_seconds_after: tuple[float, ...]
    decision: Plan | NoChange
    rebuilt_stages: tuple[int, ...]
    """Stages whose gradient buffers and optimizer have to be made anew: they hold a layer that froze or trains again after
    Megatron wrapped it, or the move changes their layers. None at step 0: there the model is built this way."""

    @property
    def layout(self) -> Layout:
        """In force from here on."""
        return self.decision.after if isinstance(self.decision, Plan) else self.decision.layout


def freeze_rounds(
    schedule: FreezeSchedule,
    workload: Workload,
    layout: Layout,
    config: DecideConfig,
    *,
    num_steps: int,
    train_embedding: bool,
) -> tuple[FreezeRound, ...]:
    """The rounds of a run of `num_steps` steps that starts at `layout`; `workload` costs what it does when all trains.

    `train_embedding` says that the embedding trains while layer 0 is frozen. The schedule is known, so a move must pay
    before its next change. At step 0 it costs nothing: the job starts at that layout. Raises ValueError when the layout
    does not place the layers, and for a workload with MTP layers, speeds, layers that must not be cut, or sends that take
    time: `decide` plans from what a job measures, and would leave them out.
    """
    for name, nothing in (("mtp", Cost()), ("speeds", None), ("uncut", ()), ("p2p_seconds", 0.0)):
        if getattr(workload, name) != nothing:
            raise ValueError(f"freeze_rounds: {name}: expected {nothing!r}, got {getattr(workload, name)!r}")
    changes = [step for step in schedule.steps if step < num_steps]
    config = replace(config, cost_changes_at=tuple(step for step in changes if step > 0))
    rounds: list[FreezeRound] = []
    frozen: frozenset[int] = frozenset()
    for step in changes:
        now = schedule.frozen(step)
        if now == frozen:
            continue
        costs = frozen_costs(workload.layers, now, trains_before=train_embedding)
        embedding = workload.embedding if train_embedding else frozen_costs([workload.embedding], {0} & now)[0]
        current = replace(workload, layers=costs, embedding=embedding)
        decision = _decide(current, layout, config, step=step, num_steps=num_steps)
        after = decision.after if isinstance(decision, Plan) else layout
        rounds.append(
            FreezeRound(
                step=step,
                frozen=tuple(sorted(now)),
                newly_frozen=tuple(sorted(now - frozen)),
                newly_trained=tuple(sorted(frozen - now)),
                costs=costs,
                stage_seconds_before=current.chunk_times(layout).stage_seconds,
                stage_seconds_after=current.chunk_times(after).stage_seconds,
                decision=decision,
                rebuilt_stages=_rebuilt(decision, after, now ^ frozen) if step else (),
            )
        )
        frozen, layout = now, after
    return tuple(rounds)


def _decide(workload: Workload, layout: Layout, config: DecideConfig, *, step: int, num_steps: int) -> Plan | NoChange:
    snapshot = Snapshot(
        iteration=step,
        layout=layout,
        layers=workload.layers,
        embedding=workload.embedding,
        head=workload.head,
        # A snapshot has it by stage, over all its chunks.
        other_seconds=workload.other_seconds * layout.num_virtual,
        stages=(),
        step_seconds=0.0,
        num_microbatches=workload.num_microbatches,
    )
    history = MoveHistory() if step else MoveHistory().observe(moved_bytes=0, seconds=0.0)
    return decide(snapshot, config, history=history, remaining_steps=num_steps - step, steps_since_move=None, scheduled=True)


def _rebuilt(decision: Plan | NoChange, after: Layout, changed: frozenset[int]) -> tuple[int, ...]:
    stage_of = after.stage_of()
    rebuilt = {stage_of[layer] for layer in changed}
    if isinstance(decision, Plan):
        rebuilt |= {pp_rank for pp_rank in range(after.num_stages) if decision.touches(pp_rank)}
    return tuple(sorted(rebuilt))
