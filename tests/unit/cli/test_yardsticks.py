"""What a rehearsal is compared with: never worse than anything that was used."""

from itertools import product

import pytest

from megatron_dyn.cli.rounds import StepSeconds
from megatron_dyn.cli.workloads import LAYER, Frame, Trace, generate
from megatron_dyn.cli.yardsticks import yardsticks
from megatron_dyn.plan import InfeasibleSplit
from megatron_dyn.plan.job import Job
from megatron_dyn.records import Cost, Layout

EVEN = Layout.contiguous((2, 2, 2))
SPLITS = [Layout.contiguous(counts) for counts in product(range(1, 5), repeat=3) if sum(counts) == 6]


def measure(trace, used=(EVEN,), **more):
    job = Job(workload=trace.workload(0), template=used[0], has_current=True, **more)
    return yardsticks(trace, job, used, step_seconds=StepSeconds(trace))


def total(trace, layout):
    return sum(length * StepSeconds(trace)(frame, layout) for frame, length in enumerate(trace.lengths))


def ramps(*, num_steps=10):
    frames = (
        Frame(step=1, layers=tuple(Cost(forward_seconds=weight, backward_seconds=2 * weight) for weight in (4, 1, 1, 1, 1, 1))),
        Frame(step=4, layers=tuple(Cost(forward_seconds=weight, backward_seconds=2 * weight) for weight in (1, 1, 1, 1, 2, 2))),
    )
    return Trace(frames=frames, num_steps=num_steps, num_microbatches=16)


def test_the_oracle_takes_the_best_layout_of_every_frame():
    trace = ramps()
    seconds = StepSeconds(trace)
    best = [min(seconds(frame, layout) for layout in SPLITS) for frame in (0, 1)]
    # The planner minimises the slowest stage first, so another split may end a step a little sooner.
    assert measure(trace).oracle_seconds == pytest.approx(3 * best[0] + 7 * best[1], rel=0.01)
    assert measure(trace).oracle_seconds < 0.9 * total(trace, EVEN)


def test_the_best_in_hindsight_is_one_layout_for_all_frames():
    trace = ramps()
    found = measure(trace)
    assert found.hindsight_seconds == pytest.approx(min(total(trace, layout) for layout in SPLITS))
    assert total(trace, found.hindsight_layout) == pytest.approx(found.hindsight_seconds)


@pytest.mark.parametrize("kind", ["moe", "pruning", "freezing", "sparse-attention", "early-exit"])
def test_neither_is_worse_than_what_the_rehearsal_used(kind):
    trace = generate(kind, (LAYER,) * 6, num_stages=3, num_steps=50, num_microbatches=4)
    used = (EVEN, Layout.contiguous((1, 2, 3)))
    found = measure(trace, used)
    assert found.oracle_seconds <= found.hindsight_seconds + 1e-9
    assert found.hindsight_seconds <= min(total(trace, layout) for layout in used) + 1e-9


def test_the_ends_count_when_candidates_are_ranked():
    # One heavy layer that wanders gives more candidates than are simulated. Without the head, earlier borders look better.
    num_layers = 24
    frames = tuple(
        Frame(
            step=1 + 10 * turn,
            layers=tuple(Cost(forward_seconds=1, backward_seconds=2 + 96 * (layer == turn)) for layer in range(num_layers)),
        )
        for turn in range(num_layers)
    )
    head = Cost(forward_seconds=20, backward_seconds=40)
    trace = Trace(frames=frames, num_steps=240, num_microbatches=16, head=head)
    found = measure(trace, (Layout.contiguous((12, 12)),))
    splits = [Layout.contiguous((count, num_layers - count)) for count in range(1, num_layers)]
    assert found.hindsight_seconds == pytest.approx(min(total(trace, layout) for layout in splits), rel=0.005)
    assert found.hindsight_layout.counts[0] > 12


def test_what_fits_nowhere_is_said():
    with pytest.raises(InfeasibleSplit):
        measure(generate("moe", (LAYER,) * 6, num_stages=3, num_steps=2), cap_bytes=1)


def test_every_frame_is_told():
    trace, told = ramps(), []
    job = Job(workload=trace.workload(0), template=EVEN, has_current=True)
    yardsticks(trace, job, (EVEN,), step_seconds=StepSeconds(trace), advance=lambda: told.append(1))
    assert len(told) == 2
