"""Generated traces: cover their run, seeded, and as their papers say where that is known."""

from itertools import pairwise

import pytest

from megatron_dyn.cli.workloads import KINDS, LAYER, generate
from megatron_dyn.config import MeasureConfig
from megatron_dyn.measure import is_sampled

LAYERS = (LAYER,) * 32
SIX = ("moe", "pruning", "freezing", "sparse-attention", "early-exit", "mixture-of-depths")


def trace_of(kind, *, seed=0, num_steps=400, layers=LAYERS):
    return generate(kind, layers, num_stages=4, num_steps=num_steps, seed=seed)


def shares(frame, layers=LAYERS):
    return [cost.seconds / full.seconds for cost, full in zip(frame.layers, layers, strict=True)]


def quarters(frame):
    row = shares(frame)
    return [round(sum(row[start : start + 8]), 6) for start in range(0, 32, 8)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_steps", [1, 3, 400])
def test_traces_cover_their_run_in_ascending_frames_that_differ(kind, num_steps):
    trace = trace_of(kind, num_steps=num_steps)
    assert trace.frames[0].step == 1
    assert all(before.step < after.step for before, after in pairwise(trace.frames))
    assert all(before.layers != after.layers for before, after in pairwise(trace.frames))
    assert sum(trace.lengths) == trace.num_steps == num_steps
    assert min(trace.lengths) >= 1
    assert {len(frame.layers) for frame in trace.frames} == {32}
    assert all(cost.seconds > 0 and cost.moved_bytes == LAYER.moved_bytes for frame in trace.frames for cost in frame.layers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_trace(kind):
    assert trace_of(kind, seed=3) == trace_of(kind, seed=3)


@pytest.mark.parametrize("kind", ["moe", "pruning", "freezing", "sparse-attention"])
def test_seeds_give_different_traces(kind):
    assert trace_of(kind, seed=1) != trace_of(kind, seed=2)


def test_all_six_kinds_of_the_paper_are_there():
    assert set(SIX) <= set(KINDS)
    with pytest.raises(ValueError, match="expected one of moe.*got 'moa'"):
        trace_of("moa")


def test_pruning_follows_the_cubic_schedule():
    trace = trace_of("pruning", num_steps=10_000)
    assert [frame.step for frame in trace.frames] == [1, 4001, 5001, 6001, 7001]
    density = [(sum(shares(frame)) / 32 - 0.2) / 0.8 for frame in trace.frames]
    assert density == pytest.approx([1.0, 1 - 0.5203125, 1 - 0.7875, 1 - 0.8859375, 0.1], abs=1e-6)
    assert len(set(shares(trace.frames[-1]))) == 32


def test_freezing_goes_front_to_back_and_leaves_a_quarter():
    frames = trace_of("freezing", num_steps=10_000).frames
    prefixes = [[share < 0.5 for share in shares(frame)] for frame in frames]
    assert all(row == sorted(row, reverse=True) for row in prefixes)
    lengths = [sum(row) for row in prefixes]
    assert lengths == sorted(lengths)
    assert 16 <= lengths[-1] <= 24
    assert min(shares(frames[-1])) == pytest.approx(1 / 3)


def test_early_exit_ends_at_its_survival_and_never_grows_with_depth():
    frames = trace_of("early-exit", num_steps=10_000).frames
    assert quarters(frames[-1]) == [8.0, 6.4, 4.8, 3.2]
    assert all(quarters(frame) == sorted(quarters(frame), reverse=True) for frame in frames)


def test_mixture_of_depths_is_static_and_even():
    trace = trace_of("mixture-of-depths")
    assert len(trace.frames) == 1
    assert quarters(trace.frames[0]) == [4.5] * 4


def test_moe_layers_are_at_most_as_slow_as_half_of_the_tokens_on_one_expert():
    values = [share for frame in trace_of("moe").frames for share in shares(frame)]
    assert min(values) >= 1.0
    assert max(values) <= 1 / 3 + 2 / 3 * 4


def test_sparse_attention_stays_between_no_attention_and_all():
    values = [share for frame in trace_of("sparse-attention").frames for share in shares(frame)]
    assert 0.5 > min(values) >= 0.3
    assert max(values) <= 1.0


def test_the_misleading_kinds_put_their_load_on_one_stage():
    assert quarters(trace_of("stationary-skew").frames[0]) == [16, 8, 8, 8]
    assert [quarters(frame).index(16) for frame in trace_of("rotating-hot-spot").frames[:5]] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("num_steps", [20, 21, 100, 300, 400, 1000, 2000])
def test_the_burst_is_the_sampled_step_nearest_to_the_middle(num_steps):
    burst = trace_of("one-step-burst", num_steps=num_steps)
    assert len(burst.frames) == 3
    assert burst.lengths[1] == 1
    assert quarters(burst.frames[1]) == [16, 8, 8, 8]
    interval, middle = MeasureConfig().interval_steps, (num_steps + 1) // 2
    step = burst.frames[1].step
    assert is_sampled(step, interval)
    distance = abs(step - middle)
    assert not any(is_sampled(other, interval) for other in range(middle - distance + 1, middle + distance))
