"""Freeze schedules and what freezing does to costs (cases C7 and C9)."""

import pytest

from megatron_dyn.cli.freeze import frozen_costs, parse_schedule, unit_layers
from megatron_dyn.config import ConfigError
from megatron_dyn.records import Cost

C9 = '{"0-7": [0, 200], "8-15": [50, -1], "16-19": [10, 100]}'


def seconds(costs):
    return [cost.seconds for cost in costs]


def test_c9_steps_and_what_is_frozen_between_them():
    schedule = parse_schedule(C9, num_layers=24)
    assert schedule.steps == (0, 10, 50, 100, 200)
    first, middle, late = set(range(8)), set(range(8, 16)), set(range(16, 20))
    for step, frozen in ((0, first), (9, first), (10, first | late), (50, first | middle | late), (99, first | middle | late)):
        assert schedule.frozen(step) == frozen
    # Ends are exclusive: at step 100 the layers train again.
    assert schedule.frozen(100) == first | middle
    assert schedule.frozen(200) == schedule.frozen(10**9) == middle


def test_short_forms_and_overlaps():
    schedule = parse_schedule('{"0-3": 20, "2-5": [10, 30], "7": -1}', num_layers=8)
    assert schedule.frozen(0) == {0, 1, 2, 3, 7}
    assert schedule.frozen(15) == {0, 1, 2, 3, 4, 5, 7}
    assert schedule.frozen(25) == {2, 3, 4, 5, 7}
    assert schedule.frozen(30) == {7}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"0-24": [0, 1]}', r"'0-24': layer 24 is unknown, the model has layers 0-23"),
        ('{"7-0": [0, 1]}', r"'7-0': expected the first layer before the last"),
        ('{"x": [0, 1]}', r"'x': expected a layer or a range"),
        ('{"-1": [0, 1]}', r"'-1': expected a layer or a range"),
        ('{"0-7": [200, 100]}', r"'0-7': expected an end after the start 200, or -1 for never, got 100"),
        ('{"0-7": [5, 5]}', r"'0-7': expected an end after the start 5"),
        ('{"0-7": [-5, 5]}', r"'0-7': expected a start of at least 0, got -5"),
        ('{"0-7": [0, -2]}', r"'0-7': expected an end after the start 0, or -1 for never, got -2"),
        ('{"0-7": [0, 1.5]}', r"'0-7': expected \[start, end\] in whole steps.*got \[0, 1.5\]"),
        ('{"0-7": [true, 5]}', r"'0-7': expected \[start, end\]"),
        ('{"0-7": [1]}', r"'0-7': expected \[start, end\].*got \[1\]"),
        ('{"0-7": "x"}', r"'0-7': expected \[start, end\]"),
        ('{"0-7": [0, 1000000001]}', r"'0-7': expected steps of at most 1000000000, got \[0, 1000000001\]$"),
        ('{"\u0660": 5}', "'\u0660': expected a layer or a range"),
        (f'{{"{"9" * 5000}": 5}}', "'9{60}': expected a layer or a range"),
        ("{}", r"expected an object such as"),
        ("[1]", r"expected an object such as.*got '\[1\]'"),
    ],
)
def test_bad_schedules_are_refused_by_name(text, told):
    with pytest.raises(ConfigError, match=f"^--freeze-schedule: {told}"):
        parse_schedule(text, num_layers=24)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"0-7"', ":1: not JSON: .*, at column 7"),
        ('{"0-7": 5,\n "0-7": 6}', ":2: expected each field once, got '0-7'"),
        ("[" * 5000, ": not JSON that can be read"),
        (f'{{"0": {"9" * 5000}}}', ": not JSON that can be read"),
        ('{"0": NaN}', ":1: expected a number, got 'NaN'"),
    ],
)
def test_what_is_no_json_is_refused(text, told):
    with pytest.raises(ConfigError, match=f"^--freeze-schedule{told}"):
        parse_schedule(text, num_layers=24)


def test_a_frozen_prefix_computes_no_backward():
    assert seconds(frozen_costs(unit_layers(24), range(8))) == [1.0] * 8 + [3.0] * 16


def test_frozen_layers_behind_a_trainable_one_still_compute_input_gradients():
    assert seconds(frozen_costs(unit_layers(24), range(4, 12))) == [3.0] * 4 + [2.0] * 8 + [3.0] * 12
    assert seconds(frozen_costs(unit_layers(4), [0, 1], trains_before=True)) == [2.0, 2.0, 3.0, 3.0]


def test_what_a_frozen_layer_loses_and_keeps():
    cost = Cost(
        forward_seconds=1.0, backward_seconds=3.0, backward_weight_seconds=1.0, optimizer_seconds=0.5, state_bytes=7,
        activation_bytes=8, moved_bytes=9,
    )  # fmt: skip
    told, untold = frozen_costs([cost, Cost(forward_seconds=1.0, backward_seconds=3.0)], [0, 1], trains_before=True)
    assert (told.forward_seconds, told.backward_seconds, told.backward_weight_seconds) == (1.0, 2.0, 0.0)
    assert told.optimizer_seconds == 0.0
    assert (told.state_bytes, told.activation_bytes, told.moved_bytes) == (7, 8, 9)
    assert untold.backward_seconds == 1.5


def test_whole_floats_are_steps():
    read = parse_schedule('{"0": [1.0, 5.0], "1": 7.0}', num_layers=2)
    assert read == parse_schedule('{"0": [1, 5], "1": 7}', num_layers=2)
    assert all(type(step) is int for step in read.steps)
