"""What the algorithms beside the exact one say of their answers, and what they refuse."""

import pytest
from hypothesis import given

from megatron_dyn.plan import InfeasibleSplit, SplitProblem
from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.rivals.answers import NotApplicable, check_no_virtual, check_places, simple_bound_seconds
from tests.unit.plan.cases import best_seconds, hard_problems


def test_the_simple_bound_counts_ends_other_work_and_speeds():
    shared = SplitProblem(
        layer_seconds=(1.0, 2.0, 3.0, 4.0),
        num_stages=2,
        num_chunks=4,
        first_seconds=0.5,
        last_seconds=2.0,
        stage_seconds=(0.25, 0.0),
        speeds=(1.0, 2.0),
    )
    assert simple_bound_seconds(shared) == (10.0 + 0.5 + 2.0 + 0.25) / 3.0
    largest = SplitProblem(layer_seconds=(1.0, 6.0), num_stages=2, speeds=(1.0, 2.0))
    assert simple_bound_seconds(largest) == 6.0 / 2.0
    # The last of three chunks is on the first stage, with both ends.
    ends = SplitProblem(layer_seconds=(1.0,) * 3, num_stages=2, num_chunks=3, first_seconds=1.0, last_seconds=5.0)
    assert simple_bound_seconds(ends) == 6.0


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name != "exact"])
def test_an_answer_that_is_not_proved_best_has_a_lower_bound(name):
    problem = SplitProblem(
        layer_seconds=(3.0, 1.0, 1.0, 1.0, 1.0, 4.0), num_stages=2, layer_parameters=(1,) * 6, last_seconds=2.0, current=(1, 5)
    )
    split = ALGORITHMS[name].solve(problem)
    assert split == problem.split(split.counts, bound_seconds=split.bound_seconds, rounds=split.rounds)
    assert split.bound_seconds <= ALGORITHMS["exact"].solve(problem).bottleneck_seconds <= split.bottleneck_seconds


@given(hard_problems())
def test_the_simple_bound_excludes_no_split(problem):
    best = best_seconds(problem)
    if best is not None:
        assert simple_bound_seconds(problem) <= best * (1 + 1e-12)


def test_what_an_algorithm_cannot_do_is_named():
    problem = SplitProblem(layer_seconds=(1.0,) * 4, num_stages=2, uncut=(2,), pinned_last=1)
    with pytest.raises(NotApplicable, match="some knows no layers that belong together: expected layers 1 and 2"):
        check_places(problem, (2, 2), "some")
    with pytest.raises(NotApplicable, match="at least 0 on the first and 1 on the last chunk, got 4 and 0"):
        check_places(problem, (4, 0), "some")
    check_places(problem, (1, 3), "some")
    with pytest.raises(InfeasibleSplit, match="some gives each stage one run of layers: expected 2 chunks"):
        check_no_virtual(SplitProblem(layer_seconds=(1.0,) * 4, num_stages=2, num_chunks=4), "some")
