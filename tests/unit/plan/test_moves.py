"""Moves are exactly the difference of two layouts, by layer id."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import moves_between
from megatron_dyn.records import Layout, Move

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""


def counts_of(num_layers: int, num_stages: int) -> st.SearchStrategy[list[int]]:
    """Any split, empty stages included."""
    cuts = st.lists(st.integers(0, num_layers), min_size=num_stages - 1, max_size=num_stages - 1).map(sorted)
    return cuts.map(lambda inner: [b - a for a, b in zip([0, *inner], [*inner, num_layers], strict=True)])


PAIRS = st.tuples(st.integers(1, 12), st.integers(1, 5)).flatmap(lambda shape: st.tuples(counts_of(*shape), counts_of(*shape)))


@PATIENT
@given(PAIRS)
def test_applying_the_moves_gives_the_new_layout(pair: tuple[list[int], list[int]]) -> None:
    """Each changed layer once, by ascending id, from where it is to where it shall be."""
    before, after = Layout.contiguous(pair[0]), Layout.contiguous(pair[1])
    moves = moves_between(before, after)
    assert [move.layer for move in moves] == sorted({move.layer for move in moves})
    places = list(before.stage_of())
    for move in moves:
        assert places[move.layer] == move.source != move.destination
        places[move.layer] = move.destination
    assert tuple(places) == after.stage_of()


def test_an_example() -> None:
    """4|4 to 2|6: the middle two leave stage 0."""
    moves = moves_between(Layout.contiguous([4, 4]), Layout.contiguous([2, 6]))
    assert moves == (Move(layer=2, source=0, destination=1), Move(layer=3, source=0, destination=1))


def test_nothing_moves_to_where_it_is() -> None:
    """Equal layouts differ in nothing, written as they may be."""
    assert moves_between(Layout.parse("Et*2|ttL", 2), Layout.parse("E,tt|t*2,L", 2)) == ()


def test_virtual_stages_of_one_rank_are_one_place() -> None:
    """`Et|t|t|tL` on 2 stages has layers 0 and 2 on stage 0; regrouping moves layers 1 and 2 across."""
    before, after = Layout.parse("Et|t|t|tL", 2), Layout.parse("Ett|||ttL", 2)
    assert [move.layer for move in moves_between(before, after)] == [1, 2]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Ett|tL", "Ett|ttL", "different models: .* places 3 layers, .* places 4"),
        ("Ett|tmL", "Ett|tL", "MTP as 1 on stage 1 and .* as none"),
        ("Ett|tmL", "Ett|tmmL", "MTP as 1 on stage 1 and .* as 2 on stage 1"),
        ("Et|t|m|L", "Et|t||mL", "MTP as 1 on stage 2 and .* as 1 on stage 3"),
        ("Et|tL|", "Et|t|L", "loss as 1 on stage 1 and .* as 1 on stage 2"),
        ("|EttL", "E|ttL", "embedding as 1 on stage 1 and .* as 1 on stage 0"),
    ],
)
def test_what_no_move_can_do_is_refused(before: str, after: str, message: str) -> None:
    """Other models, and ends that would have to travel: the message names both layouts and the difference."""
    num_stages = before.count("|") + 1
    with pytest.raises(ValueError, match=message):
        moves_between(Layout.parse(before, num_stages), Layout.parse(after, num_stages))
