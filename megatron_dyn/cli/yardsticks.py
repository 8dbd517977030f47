"""What a rehearsal is compared with: the best layout of every frame, and the best one for all of them together. Pure."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from megatron_dyn.cli.rounds import StepSeconds
from megatron_dyn.cli.workloads import Frame, Trace
from megatron_dyn.plan.job import Job, exact_split
from megatron_dyn.records import Cost, Layout

_NUM_SIMULATED = 4
"""Layouts that are simulated over the whole trace, of those whose slowest stages add up to the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Yardsticks:
    """Seconds of the whole run. Neither counts the time of a move."""

    oracle_seconds: float
    """Every frame at the best layout known for it."""
    hindsight_seconds: float
    """All frames at the one layout, of those tried, that suits them best together."""
    hindsight_layout: Layout


def yardsticks(
    trace: Trace,
    job: Job,
    used: Sequence[Layout],
    *,
    step_seconds: StepSeconds,
    advance: Callable[[], object] = lambda: None,
) -> Yardsticks:
    """Both, for `trace`; `job` holds the constraints and the first layout, `used` the layouts of the rehearsal.

    `advance` is called once a frame. No layout that was used in the rehearsal beats the oracle in any frame. The best in
    hindsight is the best of: the split of the mean costs, all that the oracle chose, all that were used; ranked by their
    slowest stages, the first few simulated. A better one may exist. Raises InfeasibleSplit when no split is possible.
    """
    bests: list[float] = []
    chosen = dict.fromkeys(used)
    for frame, length in enumerate(trace.lengths):
        best = _best(job, trace, frame)
        chosen[best] = None
        bests.append(length * min(step_seconds(frame, layout) for layout in (best, *used)))
        advance()
    mean = replace(trace, frames=(Frame(step=1, layers=_mean_layers(trace)),))
    chosen[_best(job, mean, 0)] = None
    candidates = {*_least_bottlenecks(trace, list(chosen)), *used}
    totals = {
        layout: math.fsum(length * step_seconds(frame, layout) for frame, length in enumerate(trace.lengths))
        for layout in candidates
    }
    # The text breaks ties, so that the answer does not depend on the order of a set.
    hindsight = min(totals, key=lambda layout: (totals[layout], layout.text))
    return Yardsticks(oracle_seconds=math.fsum(bests), hindsight_seconds=totals[hindsight], hindsight_layout=hindsight)


def _best(job: Job, trace: Trace, frame: int) -> Layout:
    return job.layout_of(exact_split(replace(job, workload=trace.workload(frame))).counts)


def _mean_layers(trace: Trace) -> tuple[Cost, ...]:
    """Layer by layer the mean cost over the run."""
    weights = np.array(trace.lengths, dtype=np.float64) / trace.num_steps
    forward, backward = (
        weights @ np.array([[getattr(cost, name) for cost in frame.layers] for frame in trace.frames])
        for name in ("forward_seconds", "backward_seconds")
    )
    return tuple(
        replace(cost, forward_seconds=float(ahead), backward_seconds=float(back), backward_weight_seconds=0.0)
        for cost, ahead, back in zip(trace.frames[0].layers, forward, backward, strict=True)
    )


def _least_bottlenecks(trace: Trace, layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts whose slowest stage, added up over the run, is the least."""
    seconds = np.array([[cost.seconds for cost in frame.layers] for frame in trace.frames])
    prefix = np.concatenate([np.zeros((len(trace.frames), 1)), seconds.cumsum(axis=1)], axis=1)
    lengths = np.array(trace.lengths, dtype=np.float64)

    def total(layout: Layout) -> float:
        chunks = np.diff(prefix[:, list(accumulate(layout.counts, initial=0))], axis=1)
        chunks += [chunk.embedding * trace.embedding.seconds + chunk.loss * trace.head.seconds for chunk in layout.chunks]
        stages = chunks.reshape(len(lengths), layout.num_virtual, layout.num_stages).sum(axis=1)
        return float(lengths @ stages.max(axis=1))

    return sorted(layouts, key=total)[:_NUM_SIMULATED]
