"""Ranges: whatever ranks hold and want, each wanted element comes from its one holder, and what stays does not travel."""

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.migrate import RangeError, RangeMove, ShardKey, plan_ranges

KEYS = (
    ShardKey("layer 3", "mlp.weight", "tp 0"),
    ShardKey("layer 3", "mlp.weight", "tp 1"),
    ShardKey("stage 0 chunk 1", "embedding.weight", "tp 0"),
)
KEY, OTHER = KEYS[0], KEYS[2]
TOLD = "optimizer state of layer 3 mlp.weight (tp 0): "
MAX_RANKS, MAX_ELEMENTS = 4, 20


def borders_within(size):
    return st.tuples(st.integers(0, size), st.integers(0, size)).map(lambda pair: (min(pair), max(pair)))


@st.composite
def jobs(draw, *, num_keys=3):
    """(held, wanted) by rank: the holders of a parameter part it, in any order of ranks; any rank wants any of it."""
    num_ranks = draw(st.integers(1, MAX_RANKS))
    held, wanted = [{} for _ in range(num_ranks)], [{} for _ in range(num_ranks)]
    for key in KEYS[: draw(st.integers(1, num_keys))]:
        size = draw(st.integers(1, MAX_ELEMENTS))
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=num_ranks - 1, max_size=num_ranks - 1)))
        owners = draw(st.permutations(range(num_ranks)))
        for owner, start, end in zip(owners, [0, *cuts], [*cuts, size], strict=True):
            # A rank that owns nothing of a parameter may say so, or leave it out.
            if start < end or draw(st.booleans()):
                held[owner][key] = (start, end)
        for rank in draw(st.sets(st.integers(0, num_ranks - 1))):
            wanted[rank][key] = draw(borders_within(size))
    return held, wanted


def elements(ranges):
    """{(key, element)} of one rank's ranges."""
    return {(key, element) for key, (start, end) in ranges.items() for element in range(start, end)}


def moved(move):
    return elements({move.key: (move.start, move.end)})


class TestPlan:
    @given(jobs())
    def test_every_wanted_element_is_there_exactly_once_and_comes_from_its_holder(self, job):
        held, wanted = job
        moves = plan_ranges(held, wanted)
        for rank, ranges in enumerate(wanted):
            there = [element for element in elements(ranges) if element in elements(held[rank])]
            for move in moves:
                if move.destination == rank:
                    assert moved(move) <= elements(held[move.source])
                    there += moved(move)
            assert sorted(there) == sorted(elements(ranges))

    @given(jobs())
    def test_nothing_travels_whose_owner_stays_and_no_move_is_empty(self, job):
        held, wanted = job
        for move in plan_ranges(held, wanted):
            assert move.source != move.destination
            assert move.start < move.end
            assert moved(move).isdisjoint(elements(held[move.destination]))

    @given(jobs())
    def test_a_job_that_stays_as_it_is_moves_nothing(self, job):
        held, _ = job
        assert plan_ranges(held, held) == ()

    @given(jobs(), st.randoms(use_true_random=False))
    def test_every_rank_plans_the_same_moves_in_the_same_order(self, job, shuffling):
        def told(ranges):
            """As another rank has it: unpickled, and put together in another order."""
            items = pickle.loads(pickle.dumps(list(ranges.items())))
            shuffling.shuffle(items)
            return dict(items)

        held, wanted = job
        moves = plan_ranges(held, wanted)
        assert plan_ranges([told(ranges) for ranges in held], [told(ranges) for ranges in wanted]) == moves
        # In this order the ranges between two ranks come together: they are one parcel.
        assert [(move.source, move.destination) for move in moves] == sorted((move.source, move.destination) for move in moves)
        assert len(set(moves)) == len(moves)

    def test_shifted_borders_move_what_lies_between_them_and_no_more(self):
        held = [{KEY: (0, 5)}, {KEY: (5, 10)}, {}]
        wanted = [{KEY: (0, 3)}, {KEY: (3, 7)}, {KEY: (7, 10)}]
        assert plan_ranges(held, wanted) == (
            RangeMove(source=0, destination=1, key=KEY, start=3, end=5),
            RangeMove(source=1, destination=2, key=KEY, start=7, end=10),
        )

    def test_a_range_comes_from_as_many_ranks_as_hold_it(self):
        held = [{KEY: (6, 9)}, {KEY: (0, 2)}, {KEY: (2, 6)}, {}]
        moves = plan_ranges(held, [{}, {}, {}, {KEY: (1, 8)}])
        assert [(move.source, move.start, move.end) for move in moves] == [(0, 6, 8), (1, 1, 2), (2, 2, 6)]

    def test_slices_of_one_parameter_are_kept_apart(self):
        held = [{KEYS[0]: (0, 4)}, {KEYS[1]: (0, 4)}, {}, {}]
        wanted = [{}, {}, {KEYS[0]: (0, 4)}, {KEYS[1]: (0, 4)}]
        assert [(move.source, move.destination) for move in plan_ranges(held, wanted)] == [(0, 2), (1, 3)]


class TestMisfit:
    @pytest.mark.parametrize(
        ("held", "wanted", "message"),
        [
            ([{KEY: (0, 4)}, {KEY: (6, 9)}], [{}, {KEY: (0, 9)}], "expected one holder of elements 4 to 9, got 6 to 9"),
            ([{KEY: (2, 9)}, {}], [{}, {KEY: (0, 9)}], "expected one holder of elements 0 to 9, got 2 to 9"),
            ([{KEY: (0, 5)}, {}], [{}, {KEY: (0, 9)}], "elements 5 to 9 are held by no rank"),
            ([{OTHER: (0, 9)}, {}], [{}, {KEY: (0, 9)}], "elements 0 to 9 are held by no rank"),
            ([{KEY: (0, 5)}, {KEY: (4, 9)}], [{KEY: (0, 9)}, {}], "expected one holder of elements 5 to 9, got 4 to 9"),
        ],
        ids=["a gap", "a missing start", "a missing end", "an unknown parameter", "two holders"],
    )
    def test_shards_that_do_not_add_up_are_told_by_parameter_and_elements(self, held, wanted, message):
        with pytest.raises(RangeError) as raised:
            plan_ranges(held, wanted)
        assert str(raised.value) == TOLD + message

    def test_a_gap_where_nobody_looks_is_no_concern(self):
        assert plan_ranges([{KEY: (0, 2)}, {KEY: (8, 9)}], [{KEY: (0, 2)}, {}]) == ()
        assert plan_ranges([{}, {}], [{KEY: (3, 3)}, {}]) == ()

    @given(jobs(num_keys=1), st.data())
    def test_any_element_that_is_held_by_no_rank_or_by_two_is_noticed_where_it_is_wanted(self, job, data):
        held, wanted = job
        for ranges in wanted:
            ranges.pop(KEY, None)
        size = max(end for ranges in held for _, end in ranges.values())
        start, end = data.draw(borders_within(size).filter(lambda borders: borders[0] < borders[1]))
        held, wanted = [*held, {}], [*wanted, {KEY: (start, end)}]
        assert plan_ranges(held, wanted)
        if data.draw(st.booleans()):
            held[-1] = {KEY: data.draw(borders_within(size).filter(lambda other: max(start, other[0]) < min(end, other[1])))}
        else:
            keeper = random.Random(data.draw(st.integers(0, 9))).choice(
                [rank for rank, ranges in enumerate(held) if elements(ranges) & elements(wanted[-1])]
            )
            first, last = held[keeper][KEY]
            kept = first, data.draw(st.integers(first, max(first, min(last, end) - 1)))
            held[keeper] = {KEY: kept}
        with pytest.raises(RangeError):
            plan_ranges(held, wanted)
