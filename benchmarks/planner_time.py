"""How long a decision takes: 128 layers on 16 stages, 8 to 1,024 stages with four layers each, and virtual stages.

Part of `benchmarks.planner`. The bars of the design are 10 ms for 128 layers on 16 stages and 2 s for 4,096 on 1,024. Times are
medians of the CPU time of this one-threaded process, so that other work on the machine, which the table names, does not count.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import median
from time import process_time

from benchmarks.machine import show
from megatron_dyn.config import DecideConfig
from megatron_dyn.plan import MoveHistory, decide, exact_split, job_of
from megatron_dyn.plan.job import plain_splits
from megatron_dyn.records import Cost, Layout, Snapshot

SIZES = (
    (128, 16, 1),
    *((4 * num_stages, num_stages, 1) for num_stages in (8, 16, 32, 64, 128, 256, 512, 1024)),
    *((128, 16, 2), (128, 16, 4), (64, 8, 2), (512, 64, 2)),
)
"""(layers, stages, chunks a stage): first the size that the design names, then the sweep, then virtual stages."""
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningRow:
    """Medians for one size of job."""

    num_layers: int
    num_stages: int
    num_virtual: int
    split_seconds: float
    """The first split: `plain_splits` with the tie-break towards the current one."""
    capped_seconds: float
    """The same under a memory cap that excludes the fastest splits."""
    exact_seconds: float
    """Under that cap, with the search for a shorter step."""
    decide_seconds: float
    """The whole decision under that cap: the above, simulated steps, moves."""


def noisy_job(num_layers: int, num_stages: int, num_virtual: int = 1) -> Snapshot:
    """Layers of one second and 100 MB, give or take a fifth, a head of two layers, two micro-batches per stage."""
    random = Random(num_layers * 10_007 + num_stages)
    return Snapshot(
        iteration=100,
        layout=Layout.contiguous([num_layers // num_stages // num_virtual] * (num_stages * num_virtual), num_stages=num_stages),
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


def show_times() -> list[PlanningRow]:
    """Measure every size and print the table; one row each, in order."""
    rows = measure(SIZES)
    cells = []
    for row in rows:
        times = (row.split_seconds, row.capped_seconds, row.exact_seconds, row.decide_seconds)
        stages = f"{row.num_stages:,}" if row.num_virtual == 1 else f"{row.num_stages:,} x {row.num_virtual}"
        cells.append([f"{row.num_layers:,}", stages, *(f"{1e3 * seconds:.1f}" for seconds in times)])
    columns = ["layers", "stages", "first split", "under a cap", "shortest step", "whole decision"]
    show("planning, milliseconds of CPU time", columns, cells)
    return rows


def measure(sizes: Sequence[tuple[int, int, int]], *, repeats: int = REPEATS) -> list[PlanningRow]:
    """Measure every (layers, stages, chunks a stage); one row each, in order."""
    return [_measure(noisy_job(*size), repeats) for size in sizes]


def _measure(job: Snapshot, repeats: int) -> PlanningRow:
    num_layers, num_stages = len(job.layers), job.layout.num_stages
    layers_per_stage = num_layers // num_stages
    in_flight_bytes = layers_per_stage * num_stages * job.layers[0].activation_bytes
    cap_bytes = int(1.25 * layers_per_stage * 100_000_000) + in_flight_bytes
    config = DecideConfig(stage_memory_bytes=cap_bytes)
    free, capped = job_of(job, DecideConfig()), job_of(job, config)
    return PlanningRow(
        num_layers=num_layers,
        num_stages=num_stages,
        num_virtual=job.layout.num_virtual,
        split_seconds=_median_seconds(lambda: plain_splits(free), repeats),
        capped_seconds=_median_seconds(lambda: plain_splits(capped), repeats),
        exact_seconds=_median_seconds(lambda: exact_split(capped), repeats),
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


def _median_seconds(work: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = process_time()
        work()
        times.append(process_time() - start)
    return median(times)
