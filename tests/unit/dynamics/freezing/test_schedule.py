"""FreezeSchedule: what a text freezes when; the command's own tests hold the messages (tests/unit/cli/test_freeze.py)."""

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule


def schedule_of(table, **options):
    return FreezeSchedule.of_table(table, flag="--dyn-freeze", num_layers=20, shown="text", **options)


def test_starts_are_inclusive_ends_exclusive_and_minus_one_is_for_good():
    schedule = schedule_of({"0-1": [0, 20], "1-2": [10, 30], "7": [50, -1]})
    assert [sorted(schedule.frozen(step)) for step in (0, 9, 10, 19, 20, 29, 30, 49, 50, 10**8)] == [
        [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], [1, 2], [1, 2], [], [], [7], [7],
    ]  # fmt: skip
    assert schedule.steps == (0, 10, 20, 30, 50)
    assert schedule.embedding_frozen(0) is None


def test_the_embedding_can_be_named_where_it_may():
    schedule = schedule_of({"embedding": [5, 9], "3": 4}, with_embedding=True)
    assert [schedule.embedding_frozen(step) for step in (4, 5, 8, 9)] == [False, True, True, False]
    assert schedule.frozen(3) == {3}
    assert schedule.frozen(5) == set()
    with pytest.raises(ConfigError, match="'embedding': expected a layer or a range"):
        schedule_of({"embedding": [5, 9]})


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ({"18-20": [0, 5]}, "layer 20 is unknown, the model has layers 0-19"),
        ({"3-2": [0, 5]}, "expected the first layer before the last"),
        ({"3": [5, 5]}, "expected an end after the start 5"),
        ({"3": [-2, 5]}, "expected a start of at least 0, got -2"),
        ({"3": "soon"}, "expected .start, end. in whole steps"),
        ({"three": 5}, "expected a layer or a range of layers"),
        ({}, "expected an object such as"),
        ([], "expected an object such as"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_flag_and_range(table, told):
    with pytest.raises(ConfigError, match=f"^--dyn-freeze: .*{told}"):
        schedule_of(table)
