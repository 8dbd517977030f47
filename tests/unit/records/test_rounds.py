"""The records of a round: frozen, keyword-only, and with a digest that says whether two plans are one."""

from dataclasses import FrozenInstanceError, fields, is_dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn import records
from megatron_dyn.records import Cost, Layout, Move, NoChange, Outcome, Plan, RoundReport, StageReading

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""


def plan(before: list[int], after: list[int], moves: tuple[Move, ...] = ()) -> Plan:
    """A plan between two splits."""
    return Plan(before=Layout.contiguous(before), after=Layout.contiguous(after), moves=moves, reason="test")


def test_every_record_is_frozen_and_keyword_only() -> None:
    """A record can be shared between stages without copies."""
    kinds = [getattr(records, name) for name in records.__all__]
    kinds = [kind for kind in kinds if isinstance(kind, type) and is_dataclass(kind)]
    assert len(kinds) == 12
    for kind in kinds:
        assert kind.__dataclass_params__.frozen, kind
        assert all(field.kw_only for field in fields(kind)), kind
        assert hasattr(kind, "__slots__"), kind


def test_a_record_cannot_be_changed() -> None:
    """Only replaced."""
    cost = Cost(forward_seconds=1.0)
    with pytest.raises(FrozenInstanceError):
        cost.forward_seconds = 2.0  # type: ignore[misc]
    assert replace(cost, backward_seconds=2.0).seconds == 3.0


def test_exports_are_sorted() -> None:
    """One place per name, and none twice."""
    assert records.__all__ == sorted(set(records.__all__))


def test_seconds_are_both_directions() -> None:
    """Of a layer and of a stage; the defaults cost nothing."""
    assert Cost().seconds == 0.0
    reading = StageReading(
        forward_seconds=1.0,
        backward_seconds=2.0,
        wait_seconds=10.0,
        optimizer_seconds=20.0,
        state_bytes=1,
        activation_bytes=1,
    )
    assert reading.seconds == 3.0


MOVES = st.lists(
    st.builds(Move, layer=st.integers(0, 99), source=st.integers(0, 9), destination=st.integers(0, 9)), max_size=4
).map(tuple)


@PATIENT
@given(MOVES, MOVES)
def test_equal_moves_and_equal_digests_are_the_same_thing(one: tuple[Move, ...], other: tuple[Move, ...]) -> None:
    """What ranks compare before anything moves."""
    assert (plan([4, 4], [3, 5], one).digest == plan([4, 4], [3, 5], other).digest) == (one == other)


def test_the_digest_covers_both_layouts_and_nothing_that_may_differ() -> None:
    """Words and predictions are not what moves."""
    base = plan([4, 4], [3, 5])
    assert base.digest != plan([4, 4], [2, 6]).digest
    assert base.digest != plan([5, 3], [3, 5]).digest
    assert base.digest == replace(base, reason="other", predicted_after_seconds=1.0).digest
    assert len(base.digest) == 16


def test_the_digest_is_the_same_on_every_machine_and_release() -> None:
    """Ranks compare it, and reports keep it: a known plan has a known digest."""
    moves = (Move(layer=3, source=0, destination=1),)
    assert plan([4, 4], [3, 5], moves).digest == "18b27250cee36436"


@pytest.mark.parametrize(
    ("before", "after", "num_stages", "touched"),
    [
        ([4, 4, 4], [3, 5, 4], 3, [True, True, False]),
        ([4, 4, 4], [4, 4, 4], 3, [False, False, False]),
        ([2, 2, 2, 2], [2, 1, 3, 2], 2, [True, True]),
        # Layer 1 goes from the first chunk of stage 0 to its second: the stage holds the same layers, in other places.
        ([2, 0, 1, 3], [1, 0, 2, 3], 2, [True, False]),
    ],
)
def test_a_plan_touches_a_stage_when_the_layers_of_any_of_its_chunks_change(
    before: list[int], after: list[int], num_stages: int, touched: list[bool]
) -> None:
    """Not only when layers come or go."""
    layouts = [Layout.contiguous(counts, num_stages=num_stages) for counts in (before, after)]
    found = Plan(before=layouts[0], after=layouts[1], moves=(), reason="test")
    assert [found.touches(pp_rank) for pp_rank in range(num_stages)] == touched


def test_outcomes_are_written_as_plain_words() -> None:
    """A report line holds the word itself."""
    assert [f"{outcome}" for outcome in Outcome] == ["commit", "abort", "no_change"]


def test_what_is_not_known_is_none() -> None:
    """Not zero: a forced plan predicts nothing, a fresh report has measured nothing."""
    unknown = plan([4, 4], [3, 5])
    assert (unknown.predicted_before_seconds, unknown.predicted_after_seconds) == (None, None)
    assert NoChange(layout=unknown.before, reason="test").predicted_cost_seconds is None
    report = RoundReport(round=1, iteration=2, outcome=Outcome.ABORT, reason="test", layout_before="EtL", layout_after="EtL")
    assert (report.measured_after_seconds, report.snapshot, report.moves) == (None, None, ())
