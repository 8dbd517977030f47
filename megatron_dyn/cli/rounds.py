"""A rehearsal: the rounds that a job would go through over a trace of changing costs, in virtual time.

Pure. It takes the decisions with the code of a running job (cadence, window, samples, snapshot, `decide`); only the step
times come from the simulator, and a move takes what it is assumed to take. It must not know files or consoles.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import repeat

from megatron_dyn.cli.workloads import Trace
from megatron_dyn.config import DynConfig, RebalanceMode
from megatron_dyn.measure import Cadence, Footprint, Kind, Position, Slot, StepReading, StepTimes, Window, assemble, make_sample
from megatron_dyn.plan import MoveHistory, decide
from megatron_dyn.plan.pipeline.simulator import simulate_pipeline
from megatron_dyn.plan.speeds import SpeedHistory
from megatron_dyn.records import Cost, Layout, NoChange, Outcome, Plan, RoundReport, Snapshot


class StepSeconds:
    """Simulated step times of a trace by frame and layout, each computed once."""

    def __init__(self, trace: Trace) -> None:
        """`trace` is the one that all frames are of."""
        self._trace = trace
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}

    def __call__(self, frame: int, layout: Layout) -> float:
        """Seconds of a step under `layout` while the frame with this index holds."""
        key = frame, layout.counts
        if key not in self._known:
            workload = self._trace.workload(frame)
            run = simulate_pipeline(workload.chunk_times(layout), workload.num_microbatches)
            self._known[key] = run.step_seconds
        return self._known[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """What a policy would have done, and what that would have taken."""

    rounds: tuple[RoundReport, ...]
    """As a job would report them; `measured_after_seconds` is what the next step takes."""
    layouts: tuple[Layout, ...]
    """In force, in this order."""
    static_seconds: float
    """The whole run at the first layout."""
    stepping_seconds: float
    """All steps of the run with its moves."""
    moving_seconds: float
    """All moves."""

    @property
    def policy_seconds(self) -> float:
        """The run with its moves, moves included."""
        return self.stepping_seconds + self.moving_seconds

    @property
    def num_moves(self) -> int:
        """Rounds that changed the layout."""
        return sum(report.outcome is Outcome.COMMIT for report in self.rounds)


def rehearse(
    trace: Trace,
    layout: Layout,
    config: DynConfig,
    *,
    step_seconds: StepSeconds,
    advance: Callable[[], object] = lambda: None,
) -> Rehearsal:
    """Run `trace` from `layout` under the policy of `config`; `advance` is called once a step.

    Raises ValueError when the layout does not place the layers of the trace.
    """
    run = _Run(trace, layout, config, step_seconds)
    for frame, length in enumerate(trace.lengths):
        for _ in repeat(None, length):
            run.step(frame)
            advance()
    lengths = {(frame, layout): length for frame, length in enumerate(trace.lengths)}
    return Rehearsal(
        rounds=tuple(run.rounds),
        layouts=tuple(run.layouts),
        static_seconds=_total(lengths, step_seconds),
        stepping_seconds=_total(run.num_steps, step_seconds),
        moving_seconds=run.moving_seconds,
    )


class _Run:
    """The state of a controller, and the virtual clock. One per rehearsal."""

    def __init__(self, trace: Trace, layout: Layout, config: DynConfig, step_seconds: StepSeconds) -> None:
        self._trace, self._config, self._step_seconds = trace, config, step_seconds
        self._cadence = Cadence(policy=config.rebalance, measure=config.measure, cooldown_steps=config.decide.cooldown_steps)
        self._windows = [Window(config.measure.window_samples) for _ in range(layout.num_stages)]
        self._step_times = StepTimes(warmup_steps=config.measure.warmup_steps)
        self._history, self._speeds = MoveHistory(), SpeedHistory()
        self._steps_since_move: int | None = None
        self._iteration = 0
        self.layouts = [layout]
        self.rounds: list[RoundReport] = []
        self.num_steps: Counter[tuple[int, Layout]] = Counter()
        self.moving_seconds = 0.0

    @property
    def layout(self) -> Layout:
        """The layout in force."""
        return self.layouts[-1]

    def step(self, frame: int) -> None:
        """One iteration at the costs of `frame`, and the boundary after it."""
        self._iteration += 1
        sampled = self._cadence.wants_sample(self._iteration, warm=self._step_times.warm)
        seconds = self._step_seconds(frame, self.layout)
        self.num_steps[frame, self.layout] += 1
        if self._steps_since_move is not None:
            self._steps_since_move += 1
        self._step_times.add(seconds, sampled=sampled)
        if sampled:
            self._sample(frame, seconds)
        window = self._windows[0]
        if self._cadence.round_due(
            self._iteration, self._iteration, window_full=window.full, steps_since_move=self._steps_since_move
        ):
            self._round(frame)

    def _sample(self, frame: int, step_seconds: float) -> None:
        trace = self._trace
        for window, position in zip(self._windows, _positions(self.layout), strict=True):
            layers = {layer: trace.frames[frame].layers[layer] for layer in position.layers}
            reading = _reading(position, layers, trace, iteration=self._iteration, step_seconds=step_seconds)
            window.add(reading)

    def _round(self, frame: int) -> None:
        if not len(self._windows[0]):
            reason = "nothing measured yet: the round came within the warm-up after the start or the last move"
            self._report(frame, NoChange(layout=self.layout, reason=reason))
            return
        snapshot = self._snapshot(frame)
        self._speeds = self._speeds.observe(snapshot)
        decision = decide(
            snapshot,
            self._config.decide,
            history=self._history,
            remaining_steps=self._trace.num_steps - self._iteration,
            steps_since_move=self._steps_since_move,
            scheduled=self._config.rebalance.mode is not RebalanceMode.AUTO,
            speeds=self._speeds.estimate(self.layout.num_stages).usable,
        )
        if isinstance(decision, Plan):
            self._move(frame, decision, snapshot)
        else:
            self._report(frame, decision, snapshot)
        for window in self._windows:
            window.clear()

    def _move(self, frame: int, plan: Plan, snapshot: Snapshot) -> None:
        moved_bytes = sum(self._trace.frames[frame].layers[move.layer].moved_bytes for move in plan.moves)
        seconds = self._history.estimate(moved_bytes)
        before = self._step_times.median_seconds
        self.layouts.append(plan.after)
        self.moving_seconds += seconds
        self._history = self._history.observe(moved_bytes=moved_bytes, seconds=seconds)
        self._step_times.restart()
        self._steps_since_move = 0
        report = self._report(frame, plan, snapshot)
        self.rounds[-1] = replace(
            report,
            measured_before_seconds=before,
            measured_after_seconds=self._step_seconds(frame, plan.after),
            moved_bytes=moved_bytes,
            moving_seconds=seconds,
        )

    def _snapshot(self, frame: int) -> Snapshot:
        trace = self._trace
        samples = [
            make_sample(
                position,
                window,
                Footprint(
                    layers={layer: _untimed(trace.frames[frame].layers[layer]) for layer in position.layers},
                    embedding=_untimed(trace.embedding),
                    head=_untimed(trace.head),
                ),
                iteration=self._iteration,
                step_seconds=self._step_times.median_seconds or 0.0,
            )
            for window, position in zip(self._windows, _positions(self.layout), strict=True)
        ]
        return assemble(samples, self.layout)

    def _report(self, frame: int, decision: Plan | NoChange, snapshot: Snapshot | None = None) -> RoundReport:
        moves = isinstance(decision, Plan)
        report = RoundReport(
            round=len(self.rounds) + 1,
            iteration=self._iteration,
            outcome=Outcome.COMMIT if moves else Outcome.NO_CHANGE,
            reason=decision.reason,
            layout_before=(decision.before if isinstance(decision, Plan) else decision.layout).text,
            layout_after=self.layout.text,
            moves=decision.moves if isinstance(decision, Plan) else (),
            snapshot=snapshot,
            predicted_before_seconds=decision.predicted_before_seconds,
            predicted_after_seconds=decision.predicted_after_seconds,
            predicted_cost_seconds=decision.predicted_cost_seconds,
            measured_before_seconds=self._step_times.median_seconds,
            measured_after_seconds=None if moves else self._step_seconds(frame, self.layout),
        )
        self.rounds.append(report)
        return report


def _total(num_steps: Mapping[tuple[int, Layout], int], step_seconds: StepSeconds) -> float:
    """Seconds of so many steps. Counted, so that a run without a move takes what the first layout does in every bit."""
    return math.fsum(count * step_seconds(*key) for key, count in num_steps.items())


def _positions(layout: Layout) -> list[Position]:
    """One rank a stage."""
    embedding = {index % layout.num_stages for index, chunk in enumerate(layout.chunks) if chunk.embedding}
    head = {index % layout.num_stages for index, chunk in enumerate(layout.chunks) if chunk.loss}
    return [
        Position(
            global_rank=pp_rank,
            pp_rank=pp_rank,
            layers=layout.layers_of_stage(pp_rank),
            has_embedding=pp_rank in embedding,
            has_head=pp_rank in head,
        )
        for pp_rank in range(layout.num_stages)
    ]


def _reading(position: Position, layers: dict[int, Cost], trace: Trace, *, iteration: int, step_seconds: float) -> StepReading:
    """What the profiler of this rank would have read."""
    pieces = [(Kind.LAYER, layer, cost) for layer, cost in layers.items()]
    pieces += [(Kind.EMBEDDING, -1, trace.embedding)] * position.has_embedding
    pieces += [(Kind.HEAD, -1, trace.head)] * position.has_head
    seconds = {
        Slot(kind, layer, backward): trace.num_microbatches * (cost.backward_seconds if backward else cost.forward_seconds)
        for kind, layer, cost in pieces
        for backward in (False, True)
    }
    optimizer = sum(cost.optimizer_seconds for _, _, cost in pieces)
    busy = sum(seconds.values()) + optimizer
    seconds |= {Slot(Kind.OPTIMIZER): optimizer, Slot(Kind.WAIT): max(0.0, step_seconds - busy)}
    return StepReading(iteration=iteration, num_microbatches=trace.num_microbatches, seconds=seconds)


def _untimed(cost: Cost) -> Cost:
    """The bytes of a piece alone: that is all a rank knows of it besides what it timed."""
    return Cost(state_bytes=cost.state_bytes, activation_bytes=cost.activation_bytes, moved_bytes=cost.moved_bytes)
