"""Numbers out of runs: what a layer cost when, what it was to cost, what a split of such layers can reach. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, median
from typing import Any

from megatron_dyn.cli.rounds import StepSeconds
from megatron_dyn.cli.workloads import Frame, Trace
from megatron_dyn.cli.yardsticks import Yardsticks, yardsticks
from megatron_dyn.plan import Job
from megatron_dyn.plan.rivals.deepspeed import balanced
from megatron_dyn.records import Cost, Layout


@dataclass(frozen=True, kw_only=True)
class Point:
    """What a round measured, seconds per micro-batch."""

    step: int
    """The last step with these costs."""
    layers: tuple[Cost, ...]
    embedding: Cost
    head: Cost
    num_microbatches: int
    notes: tuple[Mapping[str, Any], ...]
    """By layer: what the families said, by family."""


def points_of(rounds: Sequence[Mapping[str, Any]], every_steps: int) -> list[Point]:
    """The rounds of a report that rest on measurements, in order.

    Costs change at multiples of `every_steps` only: a round speaks for all steps up to the next one.
    """
    return [
        Point(
            step=-(-line["iteration"] // every_steps) * every_steps,
            layers=tuple(map(_cost, line["layers"])),
            embedding=_cost(line["embedding"]),
            head=_cost(line["head"]),
            num_microbatches=line["num_microbatches"],
            notes=tuple(layer.get("dynamics", {}) for layer in line["layers"]),
        )
        for line in rounds
        if "layers" in line
    ]


def _cost(fields: Mapping[str, Any]) -> Cost:
    return Cost(forward_seconds=fields["forward_seconds"], backward_seconds=fields["backward_seconds"])


def trace_of(points: Sequence[Point], num_steps: int) -> Trace:
    """The run as the planner's rehearsals know it: each point holds for the steps since the one before it.

    The ends are taken as they were in the mean. Raises ValueError without a point.
    """
    if not points:
        raise ValueError("trace_of: expected at least one measured round, got none")
    starts = [1, *(point.step + 1 for point in points[:-1])]
    frames = tuple(Frame(step=start, layers=point.layers) for start, point in zip(starts, points, strict=True))
    embedding, head = (_mean([getattr(point, name) for point in points]) for name in ("embedding", "head"))
    return Trace(
        frames=frames, num_steps=num_steps, num_microbatches=points[0].num_microbatches, embedding=embedding, head=head
    )


def _mean(costs: Sequence[Cost]) -> Cost:
    return Cost(
        forward_seconds=fmean(cost.forward_seconds for cost in costs),
        backward_seconds=fmean(cost.backward_seconds for cost in costs),
    )


def deepspeed_layout(layer_parameters: Sequence[int], end_parameters: tuple[int, int], num_stages: int) -> Layout:
    """The split by parameters as DeepSpeed makes it, where embedding and head are items of the list like any layer.

    `end_parameters` are those of embedding and head. Raises LayoutError where that leaves no valid layout.
    """
    counts = list(balanced([end_parameters[0], *layer_parameters, end_parameters[1]], num_stages))
    counts[0] -= 1
    counts[-1] -= 1
    return Layout.contiguous(counts)


def all_layouts(num_layers: int, num_stages: int) -> list[Layout]:
    """Every split into runs of at least one layer."""
    borders = combinations(range(1, num_layers), num_stages - 1)
    return [Layout.contiguous([end - start for start, end in pairwise((0, *cut, num_layers))]) for cut in borders]


def hindsight(trace: Trace, start: Layout) -> Yardsticks:
    """The best layout for the whole run and the best for each frame: by trying every split, so proved in the simulation."""
    job = Job(workload=trace.workload(0), template=start, has_current=False)
    every = all_layouts(trace.num_layers, start.num_stages)
    return yardsticks(trace, job, every, step_seconds=StepSeconds(trace))


def bound_seconds(trace: Trace, num_stages: int) -> list[float]:
    """By step: a 1F1B step if layers could be cut anywhere, so that all stages were alike. No optimizer, no transport."""
    by_frame = []
    for index in range(len(trace.frames)):
        work = trace.workload(index)
        total = math.fsum(cost.seconds for cost in (*work.layers, work.embedding, work.head))
        by_frame.append((work.num_microbatches + num_stages - 1) * total / num_stages)
    return [seconds for seconds, length in zip(by_frame, trace.lengths, strict=True) for _ in range(length)]


def imbalance(trace: Trace, layouts: Sequence[str]) -> float:
    """The mean over the run of slowest stage over mean stage; `layouts` by step, in Megatron's syntax."""
    frame_of = [index for index, length in enumerate(trace.lengths) for _ in range(length)]
    ratios = []
    for frame, text in zip(frame_of, layouts, strict=True):
        stages = trace.workload(frame).chunk_times(Layout.parse(text)).stage_seconds
        ratios.append(max(stages) / fmean(stages))
    return fmean(ratios)


def smoothed(values: Sequence[float], width: int = 5) -> list[float]:
    """The running median over `width` neighbours, fewer at the ends: without the single steps that something disturbed."""
    half = width // 2
    return [median(values[max(0, index - half) : index + half + 1]) for index in range(len(values))]


def group_seconds(by_layer: Sequence[float], ids: Sequence[int]) -> float:
    """Mean seconds of the layers with these ids, for one micro-batch."""
    return fmean(by_layer[layer] for layer in ids)
