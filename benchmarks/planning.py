"""How long planning takes, over 8 to 1,024 stages with four layers each, and for 128 layers on 16 stages.

Run with `python -m benchmarks.planning`; the planner needs neither torch nor Megatron. The bars of the design are 10 ms for 128
layers on 16 stages and 2 s for 4,096 on 1,024. Times are medians of the CPU time of this one-threaded
process, so that other work on the machine, which the table names, does not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import process_time

from benchmarks.machine import show
from megatron_dyn.config import DecideConfig
from megatron_dyn.plan import MoveHistory, SplitProblem, best_split, decide, memory_budget
from megatron_dyn.records import Cost, Layout, Snapshot

SIZES = ((128, 16), *((4 * num_stages, num_stages) for num_stages in (8, 16, 32, 64, 128, 256, 512, 1024)))
"""(layers, stages): first the size that the design names, then the sweep."""
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRow:
    """Medians for one size of job."""

    num_layers: int
    num_stages: int
    split_seconds: float
    """`best_split` with the tie-break towards the current split."""
    capped_seconds: float
    """The same under a memory cap that excludes the fastest splits."""
    decide_seconds: float
    """The whole decision under that cap: split, two simulated steps, moves."""


def noisy_job(num_layers: int, num_stages: int) -> Snapshot:
    """Layers of one second and 100 MB, give or take a fifth, a head of two layers, two micro-batches per stage."""
    random = Random(num_layers * 10_007 + num_stages)
    return Snapshot(
        iteration=100,
        layout=Layout.contiguous([num_layers // num_stages] * num_stages),
        layers=tuple(
            Cost(
                forward_seconds=random.uniform(0.8, 1.2) / 3,
                backward_seconds=random.uniform(0.8, 1.2) * 2 / 3,
                state_bytes=random.randrange(80_000_000, 120_000_000),
                activation_bytes=100_000,
                moved_bytes=random.randrange(80_000_000, 120_000_000),
            )
            for _ in range(num_layers)
        ),
        embedding=Cost(forward_seconds=0.1, backward_seconds=0.2, state_bytes=50_000_000),
        head=Cost(forward_seconds=0.7, backward_seconds=1.3, state_bytes=50_000_000),
        other_seconds=0.01,
        stages=(),
        step_seconds=0.0,
        num_microbatches=2 * num_stages,
    )


def run() -> list[PlanningRow]:
    """Measure every size and print the table; one row each, in order."""
    rows = measure(SIZES)
    cells = []
    for row in rows:
        times = (row.split_seconds, row.capped_seconds, row.decide_seconds)
        cells.append([f"{row.num_layers:,}", f"{row.num_stages:,}", *(f"{1e3 * seconds:.1f}" for seconds in times)])
    columns = ["layers", "stages", "split", "split under a cap", "whole decision"]
    show("planning, milliseconds of CPU time", columns, cells)
    return rows


def measure(sizes: Sequence[tuple[int, int]], *, repeats: int = REPEATS) -> list[PlanningRow]:
    """Measure every (layers, stages); one row each, in order."""
    return [_measure(num_layers, num_stages, repeats) for num_layers, num_stages in sizes]


def _measure(num_layers: int, num_stages: int, repeats: int) -> PlanningRow:
    job = noisy_job(num_layers, num_stages)
    layers_per_stage = num_layers // num_stages
    in_flight_bytes = layers_per_stage * num_stages * job.layers[0].activation_bytes
    cap_bytes = int(1.25 * layers_per_stage * 100_000_000) + in_flight_bytes
    free = _problem(job, cap_bytes=None)
    capped = _problem(job, cap_bytes=cap_bytes)
    config = DecideConfig(stage_memory_bytes=cap_bytes)
    return PlanningRow(
        num_layers=num_layers,
        num_stages=num_stages,
        split_seconds=_median_seconds(lambda: best_split(free), repeats),
        capped_seconds=_median_seconds(lambda: best_split(capped), repeats),
        decide_seconds=_median_seconds(
            lambda: decide(
                job,
                config,
                history=MoveHistory(),
                remaining_steps=100_000,
                steps_since_move=None,
                scheduled=False,
            ),
            repeats,
        ),
    )


def _problem(job: Snapshot, *, cap_bytes: int | None) -> SplitProblem:
    num_stages = job.layout.num_stages
    return SplitProblem(
        layer_seconds=tuple(cost.seconds for cost in job.layers),
        num_stages=num_stages,
        first_seconds=job.embedding.seconds,
        last_seconds=job.head.seconds,
        current=job.layout.counts,
        moved_bytes=tuple(cost.moved_bytes for cost in job.layers),
        memory=None if cap_bytes is None else memory_budget(job, num_stages=num_stages, cap_bytes=cap_bytes),
    )


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = process_time()
        work()
        times.append(process_time() - start)
    return median(times)


if __name__ == "__main__":
    run()
