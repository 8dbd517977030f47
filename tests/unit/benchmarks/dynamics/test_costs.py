"""Numbers out of runs, against figures that can be done by hand."""

import pytest

from benchmarks.dynamics.costs import (
    all_layouts,
    bound_seconds,
    deepspeed_layout,
    hindsight,
    imbalance,
    points_of,
    smoothed,
    trace_of,
)
from megatron_dyn.records import uniform_layout
from tests.unit.benchmarks.dynamics.runs import frozen_rounds, measured_round


def trace():
    return trace_of(points_of(frozen_rounds(), 30), 120)


def test_a_round_speaks_for_all_steps_up_to_the_next():
    rounds = [measured_round(9, [(1.0, 2.0)]), {"iteration": 12}, measured_round(20, [(1.0, 0.5)])]
    points = points_of(rounds, 10)
    assert [point.step for point in points] == [10, 20]
    found = trace_of(points, 25)
    assert found.lengths == (10, 15)
    assert [frame.layers[0].seconds for frame in found.frames] == [3.0, 1.5]


def test_without_a_measured_round_there_is_no_trace():
    with pytest.raises(ValueError, match="at least one measured round, got none"):
        trace_of([], 10)


def test_the_bound_is_a_step_of_stages_that_are_all_alike():
    # 36 seconds of layers on two stages, 8 micro-batches and one to fill the pipe.
    bound = bound_seconds(trace(), 2)
    assert len(bound) == 120
    assert [bound[step] for step in (0, 30, 60, 90)] == [9 * 18.0, 9 * 14.5, 9 * 12.0, 9 * 9.0]


def test_imbalance_is_that_of_the_layout_in_force():
    uniform, best = "Et*6|t*6L", "Et*9|t*3L"
    assert imbalance(trace(), [uniform] * 30 + [best] * 90) == pytest.approx((1 + 21 / 14.5 + 15 / 12 + 1) / 4)
    assert imbalance(trace(), [uniform] * 120) == pytest.approx((1 + 17 / 14.5 + 18 / 12 + 12 / 9) / 4)


def test_hindsight_tries_every_split():
    found = hindsight(trace(), uniform_layout(12, 2))
    totals = {}
    for layout in all_layouts(12, 2):
        stages = [trace().workload(frame).chunk_times(layout).stage_seconds for frame in range(4)]
        totals[layout.text] = sum(map(max, stages))
    assert len(totals) == 11
    assert totals[found.hindsight_layout.text] == min(totals.values())
    assert found.oracle_seconds < found.hindsight_seconds


def test_all_layouts_leave_no_stage_empty():
    assert [layout.counts for layout in all_layouts(4, 3)] == [(1, 1, 2), (1, 2, 1), (2, 1, 1)]


@pytest.mark.parametrize(
    ("layers", "ends", "counts"),
    [
        ([10] * 8, (2, 2), (4, 4)),
        ([10] * 4 + [60] * 4, (5, 5), (6, 2)),
        # The embedding weighs two layers, the head nothing.
        ([10] * 8, (40, 0), (2, 6)),
    ],
)
def test_deepspeed_counts_parameters_with_embedding_and_head_in_the_list(layers, ends, counts):
    assert deepspeed_layout(layers, ends, 2).counts == counts


def test_smoothing_takes_a_single_slow_step_away_and_keeps_a_change():
    assert smoothed([1.0, 1.0, 9.0, 1.0, 1.0, 2.0, 2.0, 2.0]) == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]
