"""The published schema is a valid schema, and each of its rules is refused in words that name place, expected and actual."""

import json

import jsonschema
import pytest

from megatron_dyn.cli.document import parse_json
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.timing_schema import check, field_rows, schema_text

STAGES = {"layout": "Et|tL", "stages": [1, 2]}

VALID = [
    [1, 2.5, {"seconds": 3}],
    {"layers": [1]},
    {"layers": [{"forward_seconds": 1, "backward_seconds": 2, "activation_bytes": 4}], "p2p_seconds": [0.1]},
    {"layers": [1], "head": {"seconds": 1, "parameter_bytes": 1, "optimizer_bytes": 2}, "mtp": 3, "speeds": [1]},
    STAGES,
]

REFUSED = [
    ("x", 'expected a list or an object, got "x"'),
    ([], "expected at least 1 item, got 0"),
    ([1, True], "[1]: expected a number or an object, got true"),
    ([1, "2"], '[1]: expected a number or an object, got "2"'),
    ([-1], "[0]: expected at least 0, got -1"),
    ([1e400], "[0]: expected at most 1e+09, got Infinity"),
    ([{}], "[0]: expected either seconds, or forward_seconds with backward_seconds, got no field"),
    ([{"forward_seconds": 1}], "[0]: expected either seconds, or forward_seconds with backward_seconds, got forward_seconds"),
    ([{"seconds": 1, "forward_seconds": 1}], "[0]: expected either seconds, or"),
    ([{"seconds": 1, "state_bytes": 1, "gradient_bytes": 1}], "[0]: expected either state_bytes, or its parts"),
    ([{"seconds": 1, "state_bytes": 1.5}], "[0].state_bytes: expected a whole number, got 1.5"),
    ([{"second": 1}], "[0].second: unknown field, did you mean 'seconds'? (and 1 more)"),
    ({"layers": [1], "zzz": 1}, "zzz: unknown field, expected one of layers, stages"),
    ({}, "expected either layers, or stages with layout"),
    ({"stages": [1]}, "expected either layers, or stages with layout"),
    (STAGES | {"head": 1}, "expected either layers, or stages with layout"),
    ({"layers": [1], "speeds": [0]}, "speeds[0]: expected more than 0, got 0"),
    ({"layers": [1], "num_stages": 2}, "num_stages: expected layout beside it, got none"),
    ({"layers": [1], "layout": "EtL", "observations": [{"layer": 0}]}, "observations[0]: expected the field 'pp_rank'"),
    ({"layers": [1], "source": "x" * 10001}, "source: 'xxx"),
]


def test_the_schema_is_one():
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("data", VALID)
def test_good_files_pass(data):
    check(parse_json(json.dumps(data), "f.json"))


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_bad_files_are_refused_by_field(data, message):
    text = json.dumps(data).replace("Infinity", "1e400")
    with pytest.raises(InputError) as error:
        check(parse_json(text, "f.json"))
    assert str(error.value).removeprefix("f.json:1: ").startswith(message)


def test_of_several_errors_the_first_line_is_named():
    with pytest.raises(InputError, match=r"f.json:2: \[0\]: expected at least 0, got -1 \(and 1 more\)$"):
        check(parse_json('[\n-1,\n"x"]', "f.json"))


def test_a_long_value_is_cut():
    with pytest.raises(InputError, match=r"got \"x{59}\.\.\.$"):
        check(parse_json(json.dumps(["x" * 1000]), "f.json"))


def test_every_field_is_listed_with_its_type_and_meaning():
    rows = {name: (kind, meaning) for name, kind, meaning in field_rows()}
    assert rows["p2p_seconds"][0] == "number or list"
    assert rows["head"][0] == "number or cost"
    assert rows["cost.state_bytes"][0] == "whole number"
    assert all(meaning.endswith(".") for _, meaning in rows.values())
