"""Stages that talk to their neighbours only: pairs decide alike, and all end in the same phase at the lock-step's split."""

import queue
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, SplitProblem
from megatron_dyn.plan.rivals.diffusion import run_in_lock_step, starting_stages
from megatron_dyn.plan.rivals.items import Item, Room
from megatron_dyn.plan.rivals.neighbours import Offer, Stage, diffuse_stage, is_left_of_pair, items_to_right
from megatron_dyn.testing.threads import ThreadWorld
from tests.unit.plan.cases import hard_problems


class QueueLink:
    """One end of the way between two threads."""

    def __init__(self, outbox, inbox):
        self.outbox, self.inbox, self.num_messages = outbox, inbox, 0

    def exchange(self, offer):
        self.outbox.put(offer)
        self.num_messages += 1
        return self.inbox.get(timeout=10)


def links_of(num_stages):
    """By stage: (left, right)."""
    ways = [(queue.Queue(), queue.Queue()) for _ in range(num_stages - 1)]
    lefts = [None, *(QueueLink(back, forth) for forth, back in ways)]
    rights = [*(QueueLink(forth, back) for forth, back in ways), None]
    return list(zip(lefts, rights, strict=True))


def diffuse_in_threads(stages):
    """Run each stage in a thread of its own; returns what they ended with: (counts, phases), and the links."""
    links = links_of(len(stages))

    def body(rank):
        return diffuse_stage(stages[rank], position=rank, left=links[rank][0], right=links[rank][1])

    phases = ThreadWorld(len(stages), timeout_seconds=15.0).run(body)
    return [tuple(stage.items) for stage in stages], phases, links


def check_against_lock_step(problem):
    apart, together = starting_stages(problem), starting_stages(problem)
    rounds = run_in_lock_step(together)
    items, phases, _ = diffuse_in_threads(apart)
    assert items == [tuple(stage.items) for stage in together]
    # All know in the same phase, as soon as the news of the last move can have come from anywhere.
    assert set(phases) == {rounds + problem.num_stages if problem.num_stages > 1 else 0}


@given(hard_problems())
def test_apart_or_in_lock_step_it_is_the_same(problem):
    try:
        starting_stages(problem)
    except InfeasibleSplit:
        return
    check_against_lock_step(problem)


def test_many_stages_end_together_after_many_rounds():
    costs = random.Random(3)
    problem = SplitProblem(
        layer_seconds=tuple(costs.lognormvariate(0, 1) for _ in range(90)), num_stages=24, current=(67, *(1,) * 23)
    )
    check_against_lock_step(problem)


def test_a_stage_talks_once_a_phase_to_one_neighbour():
    stages = starting_stages(SplitProblem(layer_seconds=(1.0,) * 8, num_stages=4))
    _, phases, links = diffuse_in_threads(stages)
    assert phases == [4] * 4
    sent = [sum(link.num_messages for link in pair if link) for pair in links]
    assert sent == [2, 4, 4, 2]


def offer(*loads, room=None, quiet=0):
    return Offer(room=room or Room(speed=1), items=tuple(Item(load=load) for load in loads), quiet_phases=quiet)


@pytest.mark.parametrize(
    ("left", "right", "crossing"),
    [
        (offer(5, 5), offer(5, 5), 0),
        (offer(1, 1, 1, 1), offer(1), 1),
        (offer(1), offer(1, 1, 1, 1), -1),
        (offer(1, 1, 1, 1, 1, 1), offer(1), 2),
        (offer(5, 5), offer(5), 0),
        (offer(9, 0), offer(1, 1), 0),
        (offer(1, 9, 0), offer(1), 0),
        (offer(9, 1, 0), offer(1), 2),
        (offer(9), offer(1), 0),
        (offer(4, 4), offer(1, room=Room(speed=2)), 1),
        (offer(1, 1, 1, room=Room(speed=1, load=9)), offer(1), 2),
        (offer(4, 4, 4), offer(1, room=Room(speed=1, cap_bytes=0)), 1),
    ],
)
def test_the_run_that_makes_the_slower_of_two_fastest_crosses(left, right, crossing):
    assert items_to_right(left, right) == crossing


def test_nothing_crosses_beyond_the_cap():
    item = Item(load=1, state_bytes=1, activation_bytes=2)
    big = Offer(room=Room(speed=1), items=(item,) * 8, quiet_phases=0)
    for cap, crossing in ((5 + 6 * 1, 0), (5 + 6 + 7, 1), (1000, 3)):
        room = Room(speed=1, in_flight=3, held_bytes=5 - 1, cap_bytes=cap)
        taker = Offer(room=room, items=(item,), quiet_phases=0)
        assert items_to_right(big, taker) == crossing


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.lists(st.integers(0, 9), min_size=1, max_size=6))
def test_both_sides_of_a_pair_take_over_what_the_other_gives(left_loads, right_loads):
    left = Stage(Room(speed=1), [Item(load=load) for load in left_loads], num_stages=2)
    right = Stage(Room(speed=1), [Item(load=load) for load in right_loads], num_stages=2)
    to_right, to_left = left.offer(), right.offer()
    assert left.meet_right(to_left) == right.meet_left(to_right)
    assert [item.load for item in (*left.items, *right.items)] == [*left_loads, *right_loads]
    assert min(len(left.items), len(right.items)) >= 1
    before, after = max(sum(left_loads), sum(right_loads)), max(sum(item.load for item in s.items) for s in (left, right))
    assert after <= before


def test_every_stage_has_one_partner_in_two_phases_out_of_two():
    for phase in (1, 2, 3):
        assert [is_left_of_pair(stage, phase) for stage in range(4)] == [phase % 2 == 1, phase % 2 == 0] * 2


def test_a_stage_that_starts_too_small_is_refused():
    with pytest.raises(ValueError, match="at least 1 items to start with, got 0"):
        Stage(Room(), [], num_stages=2)
