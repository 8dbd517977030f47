"""JSON and CSV with the line of every place; what is no JSON or no table is refused with its line."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.cli import document
from megatron_dyn.cli.document import field_name, parse_csv, parse_json, read_text
from megatron_dyn.cli.errors import InputError

TEXT = """{
\t"layers": [
\t\t1.5,
\t\t{"seconds": 2,
\t\t "kind": "a: b, {c} # d"}
\t],
\t"speeds":[1,2]}
"""


@pytest.mark.parametrize("loader", [yaml.SafeLoader, document._LOADER], ids=["pure", "as-installed"])
def test_every_place_has_its_line(loader, monkeypatch):
    monkeypatch.setattr(document, "_LOADER", loader)
    _assert_lines(parse_json(TEXT, "f.json"))


def _assert_lines(document):
    assert document.data["layers"][1] == {"seconds": 2, "kind": "a: b, {c} # d"}
    lines = {
        (): 1,
        ("layers",): 2,
        ("layers", 0): 3,
        ("layers", 1): 4,
        ("layers", 1, "kind"): 5,
        ("speeds", 1): 7,
        ("layers", 1, "missing"): 4,
    }
    assert {place: document.line_of(place) for place in lines} == lines
    assert str(document.error(("layers", 1, "kind"), "is bad")) == "f.json:5: layers[1].kind: is bad"
    assert str(document.error((), "is bad")) == "f.json:1: is bad"


@given(
    st.recursive(
        st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5), st.lists, max_leaves=6
    ),
    st.booleans(),
)
def test_any_json_has_lines_or_none_but_never_fails(value, compact):
    text = json.dumps({"a": value}, indent=None if compact else 2)
    document = parse_json(text, "f.json")
    assert document.data == {"a": value}
    assert document.line_of(("a",)) in (1 if compact else 2, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1,\n "a": 2}', "f.json:2: expected each field once, got 'a'"),
        ('{"b": {"a": 1},\n "c": [{"a": 1,\n "a": 2}]}', "f.json:3: expected each field once, got 'a'"),
        ("[1,\n NaN]", "f.json:2: expected a number, got 'NaN'"),
        ('["NaN",\n\n -Infinity]', "f.json:3: expected a number, got '-Infinity'"),
        ("[1,\n 2", "f.json:2: not JSON: Expecting ',' delimiter, at column 3"),
        ("", "f.json:1: not JSON: Expecting value, at column 1"),
        ("[" * 100_000, "f.json: not JSON that can be read"),
        (f"[{'9' * 5000}]", "f.json: not JSON that can be read"),
    ],
)
def test_what_is_no_json_is_refused_with_its_line(text, message):
    with pytest.raises(InputError) as error:
        parse_json(text, "f.json")
    assert str(error.value).startswith(message)


def test_a_table_has_layers_and_ends():
    document = parse_csv("layer, seconds,kind\nembedding,0.5,\n0,1,12\n\n1,2.5,b\nhead,3,\n", "f.csv")
    assert document.data == {
        "layers": [{"seconds": 1, "kind": "12"}, {"seconds": 2.5, "kind": "b"}],
        "embedding": {"seconds": 0.5},
        "head": {"seconds": 3},
    }
    assert document.line_of(("layers", 1, "seconds")) == 5
    assert document.line_of(("head", "seconds")) == 6
    assert document.line_of(("layers",)) == 1


def test_the_column_of_layer_ids_may_be_left_out():
    assert parse_csv("seconds\n1\n2\n", "f.csv").data == {"layers": [{"seconds": 1}, {"seconds": 2}]}


@pytest.mark.parametrize("text", ["nan", "inf", "1_000", "0x10", "+1", "1,5", ".5"])
def test_a_cell_that_is_no_json_number_stays_text(text):
    assert parse_csv(f'seconds\n"{text}"\n', "f.csv").data == {"layers": [{"seconds": text}]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.csv: expected a header"),
        ("a,a\n", "f.csv:1: expected a header of different field names, got 'a,a'"),
        ("a,\n", "f.csv:1: expected a header of different field names"),
        ("a,b\n1,2\n1\n", "f.csv:3: expected 2 cells as in the header, got 1"),
        ("layer,a\n0,1\n2,1\n", "f.csv:3: layer: expected 1 or embedding, head, mtp, got 2"),
        ("layer,a\nhead,1\nhead,1\n", "f.csv:3: layer: expected 0 or embedding, mtp, got 'head'"),
        ('a\n"1', "f.csv:2: not CSV: unexpected end of data"),
    ],
)
def test_what_is_no_table_is_refused_with_its_line(text, message):
    with pytest.raises(InputError) as error:
        parse_csv(text, "f.csv")
    assert str(error.value).startswith(message)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(InputError, match="nowhere: cannot be read: No such file"):
        read_text(f"{tmp_path}/nowhere")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="binary: expected text in UTF-8, got byte 0xff at 2"):
        read_text(f"{tmp_path}/binary")
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf[1]")
    assert read_text(f"{tmp_path}/bom") == "[1]"


def test_places_are_named_as_users_write_them():
    assert field_name(("layers", 3, "seconds")) == "layers[3].seconds"
    assert field_name((2,)) == "[2]"
