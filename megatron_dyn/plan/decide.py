"""The decision: from what was measured, a Plan that pays for itself, or NoChange and the reason.

Called by the controller with the one Snapshot that all ranks share; every rank must pass the same arguments and gets
the same answer. It must not know ranks, clocks or tensors, and keeps nothing: what past moves cost comes in as a
MoveHistory.
"""

import math
from dataclasses import dataclass

from megatron_dyn.config import DecideConfig
from megatron_dyn.plan.memory import memory_budget
from megatron_dyn.plan.moves import moves_between
from megatron_dyn.plan.partition import InfeasibleSplit, Split, SplitProblem, best_split
from megatron_dyn.plan.predict import simulate, stage_costs
from megatron_dyn.records import Layout, NoChange, Plan, Snapshot

ASSUMED_FIXED_SECONDS = 1.0
"""What a move is taken to cost whatever its size, before any was measured."""
ASSUMED_BYTES_PER_SECOND = 1e9
"""How fast a move is taken to be, before any was measured."""
_RECENT_MOVES = 3
"""Measured moves that an estimate looks at: enough to be cautious, few enough to forget a slow first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveHistory:
    """What past moves cost, to estimate the next. Equal on all ranks if all observe the same numbers."""

    observations: tuple[tuple[int, float], ...] = ()
    """(bytes moved, seconds it took) of each move, oldest first."""

    def observe(self, *, moved_bytes: int, seconds: float) -> "MoveHistory":
        """This history with one more move; raises ValueError for negative numbers."""
        if moved_bytes < 0 or not (math.isfinite(seconds) and seconds >= 0.0):
            raise ValueError(f"MoveHistory: expected bytes and seconds of at least 0, got {moved_bytes} bytes and {seconds} s")
        return MoveHistory(observations=(*self.observations, (moved_bytes, seconds)))

    def estimate(self, moved_bytes: int) -> float:
        """Seconds that moving `moved_bytes` is expected to take.

        Before any move: ASSUMED_FIXED_SECONDS plus the bytes at ASSUMED_BYTES_PER_SECOND. Afterwards that, times the
        largest ratio of measured to assumed among the last three moves: cautious, and larger for more bytes.
        """
        recent = self.observations[-_RECENT_MOVES:]
        ratio = max((seconds / _assumed_seconds(size) for size, seconds in recent), default=1.0)
        return ratio * _assumed_seconds(moved_bytes)


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
) -> Plan | NoChange:
    """The split to move to, or why none: cool-down, end of the run, no split, no better split, gain too small.

    `steps_since_move` is None before the first move; `scheduled` says that the user named this step, which overrides
    the cool-down and nothing else. The step time before is the measured one (the simulated one if none was measured);
    the time after is less by the difference of the two simulations. A Plan always predicts a shorter step.
    Raises ValueError for a layout that is not supported or does not match the snapshot's layers.
    """
    _check_layout(snapshot)
    layout = snapshot.layout
    if remaining_steps < 1:
        return NoChange(layout=layout, reason=f"the run is about to end: {remaining_steps} steps remain")
    if not scheduled and steps_since_move is not None and steps_since_move < config.cooldown_steps:
        reason = f"cool-down: {steps_since_move} steps since the last move, {config.cooldown_steps} required"
        return NoChange(layout=layout, reason=reason)
    try:
        split = _best_split(snapshot, config)
    except InfeasibleSplit as error:
        return NoChange(layout=layout, reason=f"no split is possible{_under_cap(config)}: {error}")
    after = layout.with_counts([*split.counts, *layout.counts[len(split.counts) :]])
    forecast = _forecast(snapshot, after, history)
    horizon = min(config.horizon_steps or remaining_steps, remaining_steps)
    objection = _objection(layout, after, forecast, config=config, horizon=horizon)
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


def _assumed_seconds(moved_bytes: int) -> float:
    return ASSUMED_FIXED_SECONDS + moved_bytes / ASSUMED_BYTES_PER_SECOND


def _check_layout(snapshot: Snapshot) -> None:
    layout = snapshot.layout
    if layout.num_virtual != 1:
        raise ValueError(
            f"layout {layout.text!r}: expected one model chunk per stage, got {layout.num_virtual} (virtual stages "
            "cannot be rebalanced)"
        )
    if not layout.chunks[0].embedding:
        raise ValueError(f"layout {layout.text!r}: expected the embedding on stage 0, got {layout.chunks[0].text!r}")
    layout.check_num_layers(len(snapshot.layers))


def _num_open_stages(layout: Layout) -> int:
    """Stages that may hold decoder layers: none may follow the loss, and with MTP the last layer stays where it is.

    Megatron builds the final norm beside the last decoder layer when there is MTP, so that layer cannot move without it.
    """
    if any(chunk.num_mtp for chunk in layout.chunks):
        return 1 + layout.last_chunk_with_layers
    return 1 + next(index for index, chunk in enumerate(layout.chunks) if chunk.loss)


def _best_split(snapshot: Snapshot, config: DecideConfig) -> Split:
    """The best split over the open stages; raises InfeasibleSplit."""
    layout, num_open = snapshot.layout, _num_open_stages(snapshot.layout)
    sizes = tuple(cost.moved_bytes for cost in snapshot.layers)
    cap = config.stage_memory_bytes
    return best_split(
        SplitProblem(
            layer_seconds=tuple(cost.seconds for cost in snapshot.layers),
            num_stages=num_open,
            first_seconds=snapshot.embedding.seconds,
            last_seconds=snapshot.head.seconds if layout.chunks[num_open - 1].loss else 0.0,
            min_layers=0 if config.allow_empty_stages and not any(chunk.num_mtp for chunk in layout.chunks) else 1,
            current=layout.counts[:num_open],
            moved_bytes=sizes if any(sizes) else None,
            memory=None if cap is None else memory_budget(snapshot, num_stages=num_open, cap_bytes=cap),
        )
    )


def _forecast(snapshot: Snapshot, after: Layout, history: MoveHistory) -> _Forecast:
    simulated_before = _simulated_step(snapshot, snapshot.layout)
    gain = simulated_before - _simulated_step(snapshot, after)
    before = snapshot.step_seconds or simulated_before
    if simulated_before > before:
        # Samples are taken on slower steps than the measured ones. Without this a step could be predicted to end
        # before it starts.
        gain *= before / simulated_before
    moved = (snapshot.layers[move.layer].moved_bytes for move in moves_between(snapshot.layout, after))
    return _Forecast(before=before, after=before - gain, cost=history.estimate(sum(moved)))


def _simulated_step(snapshot: Snapshot, layout: Layout) -> float:
    forward, backward = stage_costs(snapshot, layout)
    return simulate(forward, backward, snapshot.num_microbatches).step_seconds


def _objection(layout: Layout, after: Layout, forecast: _Forecast, *, config: DecideConfig, horizon: int) -> str | None:
    """Why `after` is not worth a move; None when it is."""
    step = f"{forecast.before:.4g} s to {forecast.after:.4g} s a step"
    if after == layout:
        return f"the current split {list(layout.counts)} is already the best{_under_cap(config)}"
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
