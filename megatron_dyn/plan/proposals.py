"""What an algorithm proposes for a job, with the step it is predicted to give: for people and tools, outside a run.

Used by the `megatron-dyn` command and by benchmarks. `decide` does not come here: it compares one split with the present.
"""

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.job import Job, exact_split
from megatron_dyn.plan.pipeline.predict import bubble_fraction, simulate
from megatron_dyn.plan.pipeline.schedule import in_flight_by_chunk
from megatron_dyn.plan.pipeline.simulator import PipelineRun, peak_activation_bytes, simulate_pipeline
from megatron_dyn.plan.problem import InfeasibleSplit, Split
from megatron_dyn.records import Layout

MAX_OPERATIONS = 1_000_000
"""Forwards and backwards beyond which a step is not simulated one by one (several seconds), but all stages at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """One simulated step of a job under a layout."""

    layout: Layout
    step_seconds: float
    """Pipeline and optimizer."""
    busy_seconds: tuple[float, ...]
    """By pp_rank: computing in the pipeline."""
    stage_seconds: tuple[float, ...]
    """By pp_rank: forward and backward of one micro-batch, over all chunks."""
    bubble_fraction: float
    """Share of the pipeline's time that stages wait."""
    stage_bytes: tuple[int, ...]
    """By pp_rank: state and the most activations in flight."""
    run: PipelineRun | None
    """Every forward and backward; None beyond MAX_OPERATIONS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """An algorithm's answer."""

    algorithm: str
    split: Split
    forecast: Forecast
    planning_seconds: float
    """Wall time the algorithm took, simulation of the result left out."""

    @property
    def layout(self) -> Layout:
        """The proposed layout."""
        return self.forecast.layout

    @property
    def gap(self) -> float:
        """How far the slowest stage is above the proved lower bound, as a fraction; 0 when proved best."""
        bound = self.split.bound_seconds
        return self.split.bottleneck_seconds / bound - 1.0 if bound > 0.0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An algorithm that has no answer."""

    algorithm: str
    reason: str


def forecast(job: Job, layout: Layout) -> Forecast:
    """One step of `job` under `layout`, which must place its layers; raises ValueError when Megatron would refuse it."""
    work = job.workload
    times = work.chunk_times(layout)
    num_stages = layout.num_stages
    state, activation = work.state_bytes(layout), work.activation_bytes(layout)
    run = None
    if layout.num_virtual > 1 or 2 * work.num_microbatches * len(layout.chunks) <= MAX_OPERATIONS:
        run = simulate_pipeline(times, work.num_microbatches, group_size=job.group_size)
        step, busy, bubble = run.step_seconds, run.busy_seconds, run.bubble_fraction
        held = peak_activation_bytes(run, activation)
    else:
        line = simulate(times.forward_seconds, times.backward_seconds, work.num_microbatches, times.p2p_seconds)
        busy = line.busy_seconds
        step = line.step_seconds + max(times.optimizer_seconds)
        bubble = bubble_fraction(busy, line.step_seconds)
        in_flight = in_flight_by_chunk(work.num_microbatches, num_stages)
        held = tuple(count * size for count, size in zip(in_flight, activation, strict=True))
    return Forecast(
        layout=layout,
        step_seconds=step,
        busy_seconds=busy,
        stage_seconds=times.stage_seconds,
        bubble_fraction=bubble,
        stage_bytes=tuple(sum(state[pp_rank::num_stages]) + held[pp_rank] for pp_rank in range(num_stages)),
        run=run,
    )


def propose(job: Job, algorithm: str = "exact") -> Proposal:
    """What `algorithm` (a key of ALGORITHMS) makes of `job`; raises InfeasibleSplit, or NotApplicable, with the reason."""
    started = perf_counter()
    split = exact_split(job) if algorithm == "exact" else ALGORITHMS[algorithm].solve(job.problem)
    planning_seconds = perf_counter() - started
    return Proposal(
        algorithm=algorithm,
        split=split,
        forecast=forecast(job, job.layout_of(split.counts)),
        planning_seconds=planning_seconds,
    )


def compare(job: Job, *, on_progress: Callable[[str], None] = lambda name: None) -> tuple[Proposal | Refused, ...]:
    """Every algorithm's proposal in the order of ALGORITHMS; `on_progress` is told each name before it starts."""
    answers: list[Proposal | Refused] = []
    for name in ALGORITHMS:
        on_progress(name)
        try:
            answers.append(propose(job, name))
        except InfeasibleSplit as error:
            answers.append(Refused(algorithm=name, reason=str(error)))
    return tuple(answers)
