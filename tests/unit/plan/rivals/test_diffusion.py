"""The diffusion never makes it worse, ends, keeps the order of layers, and ends where no pair of neighbours can gain."""

import random
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, MemoryBudget, SplitProblem, best_split
from megatron_dyn.plan.rivals.answers import NotApplicable
from megatron_dyn.plan.rivals.diffusion import diffusion, diffusion_parameters, run_in_lock_step, starting_stages
from megatron_dyn.plan.rivals.items import Item, Room
from megatron_dyn.plan.rivals.neighbours import Stage
from tests.unit.plan.cases import hard_problems, is_allowed, plain_problems, seconds_by_stage


def answer(problem):
    """The split, or None where there is none."""
    try:
        return diffusion(problem)
    except InfeasibleSplit:
        return None


def start_of(problem):
    return tuple(stage.room.pinned_layers + sum(item.num_layers for item in stage.items) for stage in starting_stages(problem))


@given(hard_problems())
def test_it_never_worsens_and_meets_every_constraint(problem):
    split = answer(problem)
    if split is not None:
        assert is_allowed(problem, split.counts)
        assert split.bottleneck_seconds == max(seconds_by_stage(problem, split.counts))
        assert split.bottleneck_seconds <= max(seconds_by_stage(problem, start_of(problem)))
        assert (split.rounds == 0) == (split.counts == start_of(problem))


@given(hard_problems())
def test_no_exchange_between_two_neighbours_gains(problem):
    """The end is a local optimum: every other boundary of every pair, whatever its distance, is no faster or not allowed."""
    split = answer(problem)
    if split is None:
        return
    boundaries = list(accumulate(split.counts, initial=0))
    times = seconds_by_stage(problem, split.counts)
    for stage in range(problem.num_stages - 1):
        here = max(times[stage : stage + 2])
        for boundary in range(boundaries[stage], boundaries[stage + 2] + 1):
            other = [*boundaries]
            other[stage + 1] = boundary
            counts = tuple(end - start for start, end in zip(other, other[1:], strict=False))
            if is_allowed(problem, counts):
                assert max(seconds_by_stage(problem, counts)[stage : stage + 2]) >= here


@given(plain_problems(max_layers=20, max_stages=6))
def test_with_equal_speeds_the_variance_falls_with_every_move(problem):
    def variance(counts):
        times = seconds_by_stage(problem, counts)
        return sum(time * time for time in times)

    split = diffusion(problem)
    assert variance(split.counts) <= variance(start_of(problem))
    assert (variance(split.counts) == variance(start_of(problem))) == (split.rounds == 0)


@given(st.lists(st.integers(0, 9), min_size=6, max_size=30), st.integers(2, 6))
def test_items_keep_their_order(loads, num_stages):
    """Released: moved layers are appended, so the network ran them in another order after most rebalancings."""
    items = [Item(load=load, state_bytes=index) for index, load in enumerate(loads)]
    cut = len(items) - num_stages + 1
    stages = [Stage(Room(), part, num_stages=num_stages) for part in (items[:cut], *([item] for item in items[cut:]))]
    run_in_lock_step(stages)
    assert [item for stage in stages for item in stage.items] == items


@pytest.mark.parametrize("num_stages", [1, 2, 4, 7])
def test_perfect_balance_stays(num_stages):
    """Released: the first move is always accepted, since the best variance starts at infinity."""
    even = (2,) * num_stages
    split = diffusion(SplitProblem(layer_seconds=(1.0,) * (2 * num_stages), num_stages=num_stages, current=even))
    assert (split.counts, split.rounds, split.moved_layers) == (even, 0, ())
    assert split.bound_seconds == split.bottleneck_seconds


def test_layers_only_go_to_neighbours():
    """Released: to the least loaded stage, wherever it is, without looking at what earlier moves of the round did to it."""
    stages = starting_stages(SplitProblem(layer_seconds=(1.0,) * 12, num_stages=4, current=(8, 2, 1, 1)))
    stages[0].meet_right(stages[1].offer())
    assert [len(stage.items) for stage in stages] == [5, 2, 1, 1]


def test_a_staircase_is_a_local_optimum_above_the_best():
    problem = SplitProblem(layer_seconds=(1.0,) * 12, num_stages=4, current=(6, 4, 1, 1))
    split = diffusion(problem)
    assert (split.counts, split.rounds) == ((4, 3, 3, 2), 4)
    assert best_split(problem).counts == (3, 3, 3, 3)


def test_fewer_layers_than_stages_are_refused():
    with pytest.raises(InfeasibleSplit, match="at least 8 layers"):
        diffusion(SplitProblem(layer_seconds=(1.0,) * 4, num_stages=8))


def test_an_empty_stage_is_filled_first_unless_it_may_be_empty():
    layers = (1.0, 5.0, 5.0, 1.0)
    filled = diffusion(SplitProblem(layer_seconds=layers, num_stages=3, current=(0, 4, 0)))
    assert min(filled.counts) == 1
    kept = diffusion(SplitProblem(layer_seconds=(4.0,), num_stages=3, current=(0, 1, 0), min_layers=0))
    assert kept.counts == (0, 1, 0)


def test_a_slow_stage_gets_fewer_layers():
    problem = SplitProblem(layer_seconds=(1.0,) * 32, num_stages=4, speeds=(1.0, 1.0, 0.5, 1.0))
    split = diffusion(problem)
    assert split.counts[2] <= 5
    assert split.bottleneck_seconds <= 10.0


def test_a_start_above_the_cap_that_stays_there_is_no_answer():
    memory = MemoryBudget(state_bytes=(10,) * 4, activation_bytes=(0,) * 4, in_flight=(2, 1), cap_bytes=20)
    with pytest.raises(NotApplicable, match="diffusion: stage 0 starts above the memory cap"):
        diffusion(SplitProblem(layer_seconds=(1.0, 1.0, 1.0, 9.0), num_stages=2, current=(3, 1), memory=memory))


def test_by_parameters_moves_only_for_parameters():
    problem = SplitProblem(layer_seconds=(9.0, 9.0, 1.0, 1.0), num_stages=2, layer_parameters=(1,) * 4, current=(2, 2))
    assert (diffusion_parameters(problem).rounds, diffusion(problem).counts) == (0, (1, 3))
    with pytest.raises(NotApplicable, match="virtual|one run of layers"):
        diffusion_parameters(SplitProblem(layer_seconds=(1.0,) * 4, num_stages=2, num_chunks=4))


def test_a_thousand_stages():
    costs = random.Random(1)
    problem = SplitProblem(layer_seconds=tuple(costs.lognormvariate(0, 0.5) for _ in range(4096)), num_stages=1024)
    split = diffusion(problem)
    assert sum(split.counts) == 4096
    assert split.bottleneck_seconds < max(seconds_by_stage(problem, (4,) * 1024))
