"""The decision: from what was measured, a Plan that pays for itself, or NoChange and the reason.

Called by the controller with the one Snapshot that all ranks share; every rank must pass the same arguments and gets
the same answer. It must not know ranks, clocks or tensors, and keeps nothing: what past moves cost comes in as a
MoveHistory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dyn.config import DecideConfig
from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.history import MoveHistory
from megatron_dyn.plan.job import Job, exact_splits
from megatron_dyn.plan.moves import moves_between
from megatron_dyn.plan.problem import InfeasibleSplit, Split
from megatron_dyn.plan.workload import workload_of
from megatron_dyn.records import Cost, Layout, NoChange, Plan, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class _Forecast:
    """Step times now and under a candidate, and what getting there costs. All in seconds."""

    before: float
    after: float
    cost: float

    @property
    def gain(self) -> float:
        return self.before - self.after


def decide(
    snapshot: Snapshot,
    config: DecideConfig,
    *,
    history: MoveHistory,
    remaining_steps: int,
    steps_since_move: int | None,
    scheduled: bool,
    speeds: Sequence[float] | None = None,
) -> Plan | NoChange:
    """The split to move to, or why none: cool-down, end of the run, no split, no better split, gain too small or fleeting.

    `steps_since_move` is None before the first move; `scheduled` says that the user named this step, which overrides
    the cool-down, and that the gain shows in every sample, and nothing else. `speeds`, by pp_rank, are those of ranks
    that were found to be slow or fast. The step time before is the measured one (the simulated one if none was
    measured); the time after is less by the difference of the two simulations. A Plan always predicts a shorter step.
    Raises ValueError for a layout that is not supported or does not match the snapshot's layers.
    """
    layout = snapshot.layout
    job = job_of(snapshot, config, speeds=speeds)
    if remaining_steps < 1:
        return NoChange(layout=layout, reason=f"the run is about to end: {remaining_steps} steps remain")
    if not scheduled and steps_since_move is not None and steps_since_move < config.cooldown_steps:
        reason = f"cool-down: {steps_since_move} steps since the last move, {config.cooldown_steps} required"
        return NoChange(layout=layout, reason=reason)
    try:
        splits = _splits(job, config.algorithm)
        layouts = [job.layout_of(split.counts) for split in splits]
    except ValueError as error:
        # InfeasibleSplit, or a schedule that the simulator does not know: no reason for a run that trains to end.
        return NoChange(layout=layout, reason=f"no split is possible{_under_cap(config)}: {error}")
    horizon = _horizon(snapshot.iteration, remaining_steps, config)
    # Where the shortest step is the present one, the split with the fastest slowest stage is no better.
    moving = [after for after in layouts if after != layout] if layouts[-1] != layout else []
    forecasts = [_forecast(snapshot, job, after, history) for after in moving or [layout]]
    # The second may save a little more and move far more for it. Equal ones: the first, which moves the least.
    after, forecast = max(
        zip(moving or [layout], forecasts, strict=True), key=lambda pair: pair[1].gain * horizon - pair[1].cost
    )
    objection = _objection(layout, after, forecast, config=config, horizon=horizon, proved=splits[-1].step_proved)
    if objection is None and not scheduled:
        objection = _fleeting(snapshot, job, after)
    if objection is not None:
        return NoChange(
            layout=layout,
            reason=objection,
            predicted_before_seconds=forecast.before,
            predicted_after_seconds=forecast.after,
            predicted_cost_seconds=forecast.cost,
        )
    moves = moves_between(layout, after)
    return Plan(
        before=layout,
        after=after,
        moves=moves,
        reason=_reason(forecast, num_moves=len(moves), horizon=horizon),
        predicted_before_seconds=forecast.before,
        predicted_after_seconds=forecast.after,
        predicted_cost_seconds=forecast.cost,
    )


def _splits(job: Job, algorithm: str) -> Sequence[Split]:
    """The candidates of an algorithm; raises InfeasibleSplit when there is none that the job may go to."""
    if algorithm == "exact":
        return exact_splits(job)
    split = ALGORITHMS[algorithm].solve(job.problem)
    # The baselines look at neither, as their originals do.
    if job.min_layers and 0 in split.counts:
        raise InfeasibleSplit(f"{algorithm}: {list(split.counts)} leaves chunk {split.counts.index(0)} without a layer")
    if job.cap_bytes is not None and (needed := max(job.peak_bytes(split.counts))) > job.cap_bytes:
        raise InfeasibleSplit(
            f"{algorithm}: {list(split.counts)}: expected at most {job.cap_bytes} bytes on each stage, got {needed}"
        )
    return [split]


def job_of(snapshot: Snapshot, config: DecideConfig, *, speeds: Sequence[float] | None = None) -> Job:
    """What is to be split when `snapshot` was measured; raises ValueError for layouts that do not fit it."""
    return Job(
        workload=workload_of(snapshot, speeds=speeds),
        template=snapshot.layout,
        min_layers=0 if config.allow_empty_stages else 1,
        cap_bytes=config.stage_memory_bytes,
        group_size=config.group_size,
    )


def _horizon(iteration: int, remaining_steps: int, config: DecideConfig) -> int:
    """Steps in which a move has to pay: to the end of the run, of what the user allows, or to the next known change."""
    change = min((step for step in config.cost_changes_at if step > iteration), default=iteration + remaining_steps)
    return min(config.horizon_steps or remaining_steps, remaining_steps, change - iteration)


def _forecast(snapshot: Snapshot, job: Job, after: Layout, history: MoveHistory) -> _Forecast:
    simulated_before, simulated_after = _simulated_steps(job, after)
    gain = simulated_before - simulated_after
    before = snapshot.step_seconds or simulated_before
    if simulated_before > before:
        # Samples are taken on slower steps than the measured ones. Without this a step could be predicted to end
        # before it starts.
        gain *= before / simulated_before
    moved = (snapshot.layers[move.layer].moved_bytes for move in moves_between(snapshot.layout, after))
    return _Forecast(before=before, after=before - gain, cost=history.estimate(sum(moved)))


def _simulated_steps(job: Job, after: Layout) -> tuple[float, float]:
    """Now and under `after`."""
    before, then = job.step_seconds_of([layout.counts[: job.num_open] for layout in (job.template, after)])
    return before, then


def _fleeting(snapshot: Snapshot, job: Job, after: Layout) -> str | None:
    """Why the gain may be gone by the next step: a sampled step in which there was none. None when all show it.

    The median of a few samples of a hot spot that wanders over the layers is one place where it happened to be. Moving
    there would come too late, and again and again.
    """
    for number, seconds in enumerate(snapshot.readings, start=1):
        layers = tuple(_scaled(cost, value) for cost, value in zip(snapshot.layers, seconds, strict=True))
        workload = workload_of(replace(snapshot, layers=layers), speeds=job.workload.speeds)
        before, then = _simulated_steps(replace(job, workload=workload), after)
        if not then < before:
            return (
                f"the gain is not there in every sample: in sample {number} of {len(snapshot.readings)} the split "
                f"{list(after.counts)} would change {before:.4g} s to {then:.4g} s a step"
            )
    return None


def _scaled(cost: Cost, seconds: float) -> Cost:
    """`cost` as if it had taken `seconds` in all."""
    factor = seconds / cost.seconds if cost.seconds > 0.0 else 0.0
    return replace(cost, forward_seconds=cost.forward_seconds * factor, backward_seconds=cost.backward_seconds * factor)


def _objection(
    layout: Layout, after: Layout, forecast: _Forecast, *, config: DecideConfig, horizon: int, proved: bool
) -> str | None:
    """Why `after` is not worth a move; None when it is."""
    step = f"{forecast.before:.4g} s to {forecast.after:.4g} s a step"
    if after == layout:
        best = "already the best" if proved else "the best found"
        return f"the current split {list(layout.counts)} is {best}{_under_cap(config)}"
    if not forecast.gain > 0.0:
        return f"no better split{_under_cap(config)}: the best found, {list(after.counts)}, would change {step}"
    if forecast.gain < config.min_gain * forecast.before:
        return f"gain below --dyn-min-gain: {step} saves {forecast.gain / forecast.before:.2%}, {config.min_gain:.2%} required"
    if forecast.gain * horizon <= forecast.cost:
        return (
            f"gain does not pay for the move: {step} saves {forecast.gain * horizon:.4g} s in {horizon} steps, "
            f"the move costs {forecast.cost:.4g} s"
        )
    return None


def _under_cap(config: DecideConfig) -> str:
    return "" if config.stage_memory_bytes is None else f" under --dyn-stage-memory-gib {config.stage_memory_bytes / 2**30:.4g}"


def _reason(forecast: _Forecast, *, num_moves: int, horizon: int) -> str:
    return (
        f"{forecast.before:.4g} s to {forecast.after:.4g} s a step by moving {num_moves} "
        f"layer{'s' * (num_moves != 1)}: saves {forecast.gain * horizon:.4g} s in {horizon} steps, the move costs "
        f"{forecast.cost:.4g} s"
    )
