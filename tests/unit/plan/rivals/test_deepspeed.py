"""The behaviour of DeepSpeed's functions: outputs of the real ones, noted from releases 0.12.4 (old) and 0.19.8 (new).

`benchmarks.planner --deepspeed` compares them on many more, where a release is installed.
"""

import pytest

from megatron_dyn.plan import SplitProblem
from megatron_dyn.plan.rivals import deepspeed
from megatron_dyn.plan.rivals.answers import NotApplicable
from megatron_dyn.plan.rivals.deepspeed import (
    balanced,
    balanced_old,
    deepspeed_balanced,
    deepspeed_balanced_old,
    deepspeed_parameters,
)

SEEN = [
    (
        [
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
            1,
        ],
        16,
        (3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 0),
        (3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 2, 2, 2, 2, 2, 2),
    ),
    ([1, 1, 1, 1, 1], 4, (2, 2, 1, 0), (2, 1, 1, 1)),
    (
        [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        8,
        (5, 5, 5, 5, 5, 5, 5, 3),
        (5, 5, 5, 5, 5, 5, 4, 4),
    ),
    ([1, 2, 1], 4, (1, 1, 1, 0), (1, 1, 1, 0)),
    ([1, 1, 1, 1, 0, 1], 4, (2, 3, 1, 0), (2, 1, 2, 1)),
    ([10, 1, 1, 1, 1], 2, (0, 5), (1, 4)),
    ([0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0], 3, (5, 3, 4), (5, 2, 5)),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], 4, (5, 2, 3, 2), (5, 2, 3, 2)),
    ([0.25, 0.5, 4.0, 0.125, 0.5, 1.0, 0.75, 0.5], 3, (2, 1, 5), (2, 1, 5)),
    ([], 2, (0, 0), (0, 0)),
    ([1, 2, 3, 4], 8, (1, 1, 1, 1, 0, 0, 0, 0), (1, 1, 1, 1, 0, 0, 0, 0)),
    ([1.0, 1.0, 1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0], 4, (4, 1, 4, 0), (4, 1, 2, 2)),
    ([0.001, 0.001, 0.001, 0.001, 0.001, 0.001], 3, (2, 2, 2), (2, 2, 2)),
    # Only a search that goes on from a little above what failed ends here.
    ([0.0185546875, 0.001953125, 0.0234375, 0.01953125], 2, (3, 1), (2, 2)),
]


@pytest.mark.parametrize(("weights", "num_parts", "old", "new"), SEEN)
def test_equals_what_the_real_functions_gave(weights, num_parts, old, new):
    assert balanced_old(weights, num_parts) == old
    assert balanced(weights, num_parts) == new


def test_the_old_one_is_coarse_where_costs_are_small():
    """Its epsilon is 1e-3 whatever the unit: in seconds, layers of a millisecond all end up on one stage."""
    milliseconds = (1.0, 1.5, 0.5, 1.0, 0.75, 1.25)
    assert balanced_old([seconds / 1e4 for seconds in milliseconds], 3) == (5, 1, 0)
    assert balanced_old(milliseconds, 3) == (2, 3, 1)


def test_the_new_one_aims_at_the_difference_not_at_the_slowest():
    problem = SplitProblem(layer_seconds=(1.0,) * 6, num_stages=3, last_seconds=2.0)
    split = deepspeed_balanced(problem)
    assert split.counts == (2, 2, 2)
    assert split.bottleneck_seconds == 4.0  # the head is on the last stage whether the function sees it or not


def test_old_and_by_parameters_answer_problems_too():
    problem = SplitProblem(layer_seconds=(1e-3,) * 5, num_stages=4, layer_parameters=(4, 1, 1, 1, 1), current=(2, 1, 1, 1))
    assert deepspeed_balanced_old(problem).counts == (2, 2, 1, 0)
    by_parameters = deepspeed_parameters(problem)
    assert (by_parameters.counts, by_parameters.moved_layers) == ((1, 2, 1, 1), (1,))


def test_what_they_do_not_know_is_refused():
    virtual = SplitProblem(layer_seconds=(1.0,) * 8, num_stages=2, num_chunks=4)
    unknown = SplitProblem(layer_seconds=(1.0,) * 8, num_stages=2)
    uncut = SplitProblem(layer_seconds=(1.0,) * 8, num_stages=2, uncut=(4,))
    with pytest.raises(NotApplicable, match="deepspeed-balanced gives each stage one run"):
        deepspeed_balanced(virtual)
    with pytest.raises(NotApplicable, match="deepspeed-parameters: expected the parameters"):
        deepspeed_parameters(unknown)
    with pytest.raises(NotApplicable, match="layers 3 and 4 on one chunk"):
        deepspeed_balanced_old(uncut)


@pytest.mark.parametrize("solve", [deepspeed_parameters, deepspeed_balanced, deepspeed_balanced_old])
def test_virtual_stages_are_refused_before_the_quadratic_work(solve, monkeypatch):
    def fail(weights, num_parts):
        pytest.fail("balanced a problem that it refuses")

    monkeypatch.setattr(deepspeed, "balanced", fail)
    monkeypatch.setattr(deepspeed, "balanced_old", fail)
    virtual = SplitProblem(layer_seconds=(1.0,) * 8, num_stages=2, num_chunks=4, layer_parameters=(1,) * 8)
    with pytest.raises(NotApplicable, match="gives each stage one run"):
        solve(virtual)
