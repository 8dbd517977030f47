"""Carries the records from stage to stage: measure -> plan -> migrate -> rebuild -> report; it alone knows the order.

One controller per rank; all ranks make the same calls with the same iterations, so every rank takes the same decisions and
the collectives inside a round always meet. It knows no Megatron: the host injects a Crew.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from megatron_dyn.config import DynConfig, RebalanceMode, ShrinkGoal
from megatron_dyn.measure import Cadence, Footprint, Position, StepReading, StepTimes, Window, assemble, make_sample
from megatron_dyn.migrate import Seat, Source, execute
from megatron_dyn.plan import MoveHistory, SpeedHistory, advise, decide, job_of, moves_between
from megatron_dyn.ports import Collective, LayerStore, PeakMemory, Sink, Transport
from megatron_dyn.rebuild import rebuild
from megatron_dyn.records import Layout, NoChange, Outcome, Plan, Rebuilt, Receipt, RoundReport, Snapshot

logger = logging.getLogger(__name__)


class State(StrEnum):
    """Where a round stands. A round goes through these in order; `ABORTED` takes the place of `COMMITTED` after a no."""

    IDLE = "idle"
    MEASURING = "measuring"
    PLANNED = "planned"
    STAGED = "staged"
    COMMITTED = "committed"
    ABORTED = "aborted"
    REPORTED = "reported"


class Profiler(Protocol):
    """What the controller needs of the host to measure."""

    def start(self) -> None:
        """Hook in for the step that begins."""

    def stop(self, iteration: int) -> StepReading:
        """Take the hooks out and read the step."""

    def position(self) -> Position:
        """Where this rank stands and what it holds now."""

    def footprint(self) -> Footprint:
        """What the pieces on this rank weigh now."""

    def cancel(self) -> None:
        """Take the hooks out of a step that failed; idempotent."""

    def layout_changed(self) -> None:
        """Weigh activations anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Everything the controller works with, injected by the composition root."""

    collective: Collective
    transport: Transport
    store: LayerStore
    seat: Seat
    source: Source
    profiler: Profiler
    memory: PeakMemory
    sinks: Sequence[Sink]
    """Empty on all ranks but the one that writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figures:
    """What a round measured and what it took."""

    snapshot: Snapshot | None = None
    speeds: tuple[float | None, ...] | None = None
    shrink_advice: str | None = None
    deciding_seconds: float = 0.0
    moving_seconds: float = 0.0
    moved_bytes: int = 0
    peak_extra_bytes: int | None = None


class Controller:
    """Drives the rounds of one job. Call `before_step`, `after_step`, `at_boundary` once per step on every rank."""

    def __init__(
        self, config: DynConfig, crew: Crew, *, layout: Layout, forced: dict[int, Layout], last_step: int, tokens_per_step: int
    ) -> None:
        """`layout` is what Megatron built; `forced` maps iterations to layouts; `last_step` is the run's last iteration."""
        self._config, self._crew = config, crew
        self._forced, self._last_step, self._tokens_per_step = dict(forced), last_step, tokens_per_step
        self._cadence = Cadence(policy=config.rebalance, measure=config.measure, cooldown_steps=config.decide.cooldown_steps)
        self._window = Window(config.measure.window_samples)
        self._step_times = StepTimes(warmup_steps=config.measure.warmup_steps)
        self._history, self._speeds = MoveHistory(), SpeedHistory()
        self._sampling = False
        self._measuring_seconds = 0.0
        self._steps_since_move: int | None = None
        self._num_rounds = 0
        self._last_boundary: int | None = None
        self._requested: Layout | None = None
        self._eager = False
        """Whether costs are known to have changed since the last round."""
        self._pending: RoundReport | None = None
        """The last commit, while its new step time is not known."""
        self._settled: RoundReport | None = None
        """The last commit, once it is, while its layout is in force."""
        self.layout = layout
        self.state = State.IDLE

    @property
    def layout_text(self) -> str:
        """The layout in force, in Megatron's syntax."""
        return self.layout.text

    def begin(self, step: int) -> None:
        """Training is about to (re)start after iteration `step`: bring the forced layout in force that is due by then.

        All ranks must call, before the first step. Raises like `at_boundary`.
        """
        self._last_boundary = step
        if layout := self._pop_due(step):
            self._forced_round(step, layout)

    def request(self, layout: Layout) -> None:
        """Bring `layout` in force at the next step boundary; the last request before it counts.

        For code that runs inside a step and knows that costs are about to change. Nothing moves now: gradients of this
        step belong to the layers where they are. All ranks must request the same before that boundary; a layout of
        --dyn-layout-at that is due there wins. Raises ValueError for a layout that this run cannot go to.
        """
        if (objection := self._config.objection(layout, built=self.layout)) is not None:
            raise ValueError(f"requested layout: {objection}")
        self._requested = layout

    def before_step(self, step: int) -> None:
        """Step `step` (1-based) is about to run: hook in if it is to be sampled."""
        if self._config.rebalances and self._cadence.wants_sample(step, warm=self._step_times.warm, eager=self._eager):
            started = time.perf_counter()
            self._enter(State.MEASURING)
            self._sampling = True
            self._crew.profiler.start()
            self._measuring_seconds += time.perf_counter() - started

    def after_step(self, step: int, seconds: float) -> None:
        """Step `step` ended after `seconds` of wall time."""
        if self._steps_since_move is not None:
            self._steps_since_move += 1
        self._step_times.add(seconds, sampled=self._sampling)
        if not self._sampling:
            return
        started = time.perf_counter()
        self._sampling = False
        self._window.add(self._crew.profiler.stop(step))
        self._measuring_seconds += time.perf_counter() - started

    def costs_changed(self) -> None:
        """Layers cost something else from the next step on: what was measured is stale. Call it before `at_boundary`.

        In `auto` every step is sampled until the next round, and the cool-down of the last move is over: it is there to
        keep noise from moving layers, and this is none. All ranks must call.
        """
        # A later figure would compare the layout under the new costs with the one before it under the old ones.
        self._settle()
        self._window.clear()
        self._step_times.forget()
        self._speeds = SpeedHistory()
        self._steps_since_move = None
        self._eager = True
        self._crew.profiler.layout_changed()

    def at_boundary(self, step: int) -> None:
        """The optimizer of step `step` is done, the next step has not begun: the only place where layers may move.

        All ranks must call. Raises CollectiveTimeout, PlanMismatch or RebuildError when the job cannot go on.
        """
        enough = min(self._config.measure.window_samples, StepTimes.SIZE)
        if self._pending is not None and len(self._step_times) >= enough:
            self._report_measured()
        requested, self._requested = self._requested, None
        if forced := self._pop_due(step):
            if requested is not None:
                logger.warning("the request for layout %s is dropped: --dyn-layout-at is due", requested.text)
            self._forced_round(step, forced)
        elif requested is not None and requested != self.layout:
            self._forced_round(step, requested, reason="requested")
        elif self._round_due(step):
            self._measured_round(step)
        self._last_boundary = step

    def close(self) -> None:
        """The run is over, or failed: write what is pending and close the sinks. Idempotent, no collectives."""
        if self._sampling:
            self._crew.profiler.cancel()
            self._sampling = False
        self._settle()
        for sink in self._crew.sinks:
            try:
                sink.close()
            except OSError as error:
                # What a full disk did not take at the last write is tried again here.
                logger.error("a report could not be closed: %s", error)

    def _round_due(self, step: int) -> bool:
        if not self._config.rebalances:
            return False
        # Megatron may skip iterations: a step that was due in between is due now.
        first = step if self._last_boundary is None else self._last_boundary + 1
        return self._cadence.round_due(first, step, window_full=self._window.full, steps_since_move=self._steps_since_move)

    def _pop_due(self, step: int) -> Layout | None:
        """The newest forced layout due by `step`, once. (Megatron may skip iterations, so equality would not do.)"""
        due = sorted(at for at in self._forced if at <= step)
        layouts = [self._forced.pop(at) for at in due]
        return layouts[-1] if layouts and layouts[-1] != self.layout else None

    def _forced_round(self, step: int, layout: Layout, reason: str = "forced by --dyn-layout-at") -> None:
        plan = Plan(
            before=self.layout,
            after=layout,
            moves=moves_between(self.layout, layout),
            reason=reason,
        )
        self._move(step, plan, _Figures())

    def _measured_round(self, step: int) -> None:
        if not len(self._window):
            reason = "nothing measured yet: the round came within the warm-up after the start or the last move"
            self._report(step, NoChange(layout=self.layout, reason=reason), _Figures())
            return
        self._eager = False
        started = time.perf_counter()
        snapshot = self._snapshot(step)
        self._measuring_seconds += time.perf_counter() - started
        started = time.perf_counter()
        self._speeds = self._speeds.observe(snapshot)
        estimate = self._speeds.estimate(self.layout.num_stages)
        decision = decide(
            snapshot,
            self._config.decide,
            history=self._history,
            remaining_steps=self._last_step - step,
            steps_since_move=self._steps_since_move,
            scheduled=self._config.rebalance.mode is not RebalanceMode.AUTO,
            speeds=estimate.usable,
        )
        figures = _Figures(
            snapshot=snapshot,
            speeds=estimate.speeds if any(speed is not None for speed in estimate.speeds) else None,
            shrink_advice=self._shrink_advice(snapshot, estimate.usable),
            deciding_seconds=time.perf_counter() - started,
        )
        if isinstance(decision, NoChange):
            self._window.clear()
            self._report(step, decision, figures)
        else:
            self._move(step, decision, figures)

    def _shrink_advice(self, snapshot: Snapshot, speeds: tuple[float, ...] | None) -> str | None:
        policy = self._config.shrink
        if policy.goal is ShrinkGoal.OFF:
            return None
        return advise(job_of(snapshot, self._config.decide, speeds=speeds), policy)

    def _snapshot(self, step: int) -> Snapshot:
        sample = make_sample(
            self._crew.profiler.position(),
            self._window,
            self._crew.profiler.footprint(),
            iteration=step,
            step_seconds=self._step_times.median_seconds or 0.0,
        )
        return assemble(self._crew.collective.gather(sample, "samples"), self.layout)

    def _move(self, step: int, plan: Plan, figures: _Figures) -> None:
        self._enter(State.PLANNED)
        crew = self._crew
        crew.memory.start()
        staged = execute(
            plan,
            crew.seat,
            crew.source,
            collective=crew.collective,
            transport=crew.transport,
            bucket_bytes=self._config.bucket_bytes,
        )
        self._enter(State.STAGED)
        rebuilt = rebuild(
            plan,
            staged,
            staged.receipt.problem,
            pp_rank=crew.seat.pp_rank,
            store=crew.store,
            collective=crew.collective,
        )
        self._enter(State.COMMITTED if rebuilt.committed else State.ABORTED)
        cost = self._cost_of(staged.receipt, rebuilt)
        self._report(step, plan, replace(figures, **cost), rebuilt)
        self._window.clear()
        if rebuilt.committed:
            self.layout = plan.after
            self._history = self._history.observe(moved_bytes=cost["moved_bytes"], seconds=cost["moving_seconds"])
            self._step_times.restart()
            self._crew.profiler.layout_changed()
        # An aborted move also starts the cool-down: what failed a moment ago would likely fail again.
        self._steps_since_move = 0

    def _cost_of(self, receipt: Receipt, rebuilt: Rebuilt) -> dict[str, Any]:
        """The part of `_Figures` that a move fills, the same numbers on every rank."""
        mine = (receipt.seconds + rebuilt.seconds, receipt.received_bytes, self._crew.memory.stop())
        costs: list[tuple[float, int, int | None]] = self._crew.collective.gather(mine, "cost of the move")
        peaks = [peak for _, _, peak in costs if peak is not None]
        return {
            "moving_seconds": max(seconds for seconds, _, _ in costs),
            "moved_bytes": sum(num_bytes for _, num_bytes, _ in costs),
            "peak_extra_bytes": max(peaks) if len(peaks) == len(costs) else None,
        }

    def _report(self, step: int, decision: Plan | NoChange, figures: _Figures, rebuilt: Rebuilt | None = None) -> None:
        if self._pending is not None and len(self._step_times):
            self._report_measured()
        committed = rebuilt is not None and rebuilt.committed
        outcome = Outcome.NO_CHANGE if rebuilt is None else Outcome.COMMIT if committed else Outcome.ABORT
        after = decision.after if isinstance(decision, Plan) and committed else self.layout
        self._num_rounds += 1
        report = RoundReport(
            round=self._num_rounds,
            iteration=step,
            outcome=outcome,
            reason=decision.reason if rebuilt is None or committed else f"{rebuilt.problem} ({decision.reason})",
            layout_before=self.layout.text,
            layout_after=after.text,
            moves=decision.moves if isinstance(decision, Plan) else (),
            snapshot=figures.snapshot,
            speeds=figures.speeds,
            shrink_advice=figures.shrink_advice,
            predicted_before_seconds=decision.predicted_before_seconds,
            predicted_after_seconds=decision.predicted_after_seconds,
            predicted_cost_seconds=decision.predicted_cost_seconds,
            measured_before_seconds=self._step_times.median_seconds,
            tokens_per_step=self._tokens_per_step,
            moved_bytes=figures.moved_bytes,
            measuring_seconds=self._measuring_seconds,
            deciding_seconds=figures.deciding_seconds,
            moving_seconds=figures.moving_seconds,
            peak_extra_bytes=figures.peak_extra_bytes,
        )
        self._measuring_seconds = 0.0
        if committed:
            self._pending, self._settled = report, None
        self._write(report)
        self._enter(State.REPORTED)
        self._enter(State.IDLE)

    def _settle(self) -> None:
        """Say the last word on the last commit: its layout, or what its layers cost, is about to be history."""
        if self._pending is not None and len(self._step_times):
            self._report_measured()
        final = self._step_times.median_seconds
        if self._settled is not None and final not in (None, self._settled.measured_after_seconds):
            # By now many more steps speak for the layout than the few that completed the line at first.
            self._write(replace(self._settled, measured_after_seconds=final))
        self._pending = self._settled = None

    def _report_measured(self) -> None:
        """The step time under the layout of the last commit is known: complete its line."""
        if self._pending is not None:
            self._settled = replace(self._pending, measured_after_seconds=self._step_times.median_seconds)
            self._pending = None
            self._write(self._settled)

    def _write(self, report: RoundReport) -> None:
        for sink in self._crew.sinks:
            try:
                sink.write(report)
            except OSError as error:
                # A full disk must not end a run that trains well, nor leave the other ranks waiting for this one.
                logger.error("round %d could not be reported: %s", report.round, error)

    def _enter(self, state: State) -> None:
        logger.debug("state %s -> %s", self.state.value, state.value)
        self.state = state
