"""Trace files: read back equal, refused by file, line and field, and as the published schema says."""

import json
from dataclasses import replace

import jsonschema
import pytest
from referencing import Registry, Resource

from megatron_dyn.cli.timing_schema import schema_text
from megatron_dyn.cli.trace_file import read_trace, trace_schema_text, write_trace
from megatron_dyn.cli.workloads import KINDS, LAYER, generate
from megatron_dyn.config import ConfigError
from megatron_dyn.records import Cost, Layout

FRAME = {"step": 1, "layers": [1, 2]}
FULL = {"forward_seconds": 1.0, "backward_seconds": 2.0, "state_bytes": 3, "moved_bytes": 4}
GOOD = [
    [FRAME],
    [FRAME, {"step": 5, "layers": [{"seconds": 3}, {"forward_seconds": 1, "backward_seconds": 2, "kind": "moe"}]}],
    {
        "frames": [{"step": 0, "layers": [FULL, FULL]}],
        "steps": 9,
        "num_microbatches": 4,
        "embedding": 1,
        "head": {"seconds": 2},
    },
    {"frames": [FRAME], "p2p_seconds": 0.1, "layout": "Et|tL", "source": "by hand"},
    {"frames": [FRAME], "layout": "Et|t||L", "num_stages": 2.0},
]
BAD = [
    ([], r"expected frames, a list of at least 1"),
    ({"frames": 3}, r":1: frames: expected frames, a list"),
    ({"steps": 3}, r":1: expected frames"),
    (3, r":1: expected a list of frames or an object, got 3"),
    ([{"step": 1}], r":1: frames\[0\]: expected an object with step and layers"),
    ([FRAME | {"more": 1}], r":1: frames\[0\]: expected an object with step and layers"),
    ([{"step": 1.5, "layers": [1]}], r":1: frames\[0\].step: expected a whole number from 0 to 1000000, got 1.5"),
    ([{"step": True, "layers": [1]}], r":1: frames\[0\].step: expected a whole number"),
    ([{"step": 1, "layers": []}], r":1: frames\[0\].layers: expected at least 1 item"),
    ([{"step": 1, "layers": [1, -2]}], r":1: frames\[0\].layers\[1\]: expected at least 0, got -2"),
    (
        [{"step": 1, "layers": [FULL, FULL | {"state_bytes": 1.5}]}],
        r":1: frames\[0\].layers\[1\].state_bytes: expected a whole",
    ),
    ([{"step": 1, "layers": [FULL, FULL | {"forward_seconds": -1.0}]}], r":1: frames\[0\].layers\[1\].forward_seconds"),
    ({"frames": [FRAME], "speeds": [1]}, r":1: speeds: unknown field, expected one of frames, "),
    ({"frames": [FRAME], "num_stages": 2}, r":1: num_stages: expected layout beside it"),
    ({"frames": [FRAME], "head": -1}, r":1: head: expected at least 0, got -1"),
    ({"frames": [FRAME], "p2p_seconds": [1]}, r":1: p2p_seconds: expected one number"),
    ({"frames": [FRAME], "steps": 1_000_001}, r":1: steps: expected a whole number from 1 to 1000000, got 1000001"),
    ([FRAME, FRAME | {"step": 1_000_001}], r":1: frames\[1\].step: expected a whole number from 0 to 1000000, got 1000001"),
    ({"frames": [FRAME], "num_microbatches": 65_537}, r":1: num_microbatches: expected at most 65536, got 65537"),
    ({"frames": [FRAME], "steps": 0}, r":1: steps: expected a whole number from 1 to 1000000, got 0"),
]
"""What the schema refuses, and the error."""
INCONSISTENT = [
    ([{"step": 2, "layers": [1]}], r":1: frames\[0\].step: expected 1, the first iteration, got 2"),
    ([FRAME, FRAME], r":1: frames\[1\].step: expected more than 1, got 1"),
    ([FRAME, {"step": 2, "layers": [1]}], r":1: frames\[1\].layers: expected 2 layers as in the frames before, got 1"),
    ({"frames": [FRAME, FRAME | {"step": 9}], "steps": 8}, r":1: steps: expected a whole number from 9 to 1000000, got 8"),
    ({"frames": [FRAME], "layout": "Et|L"}, r":1: layout: places 1 layers, layers lists 2"),
    ({"frames": [FRAME], "layout": "Et|tL", "num_stages": 3}, r":1: layout: layout 'Et\|tL': 2 stages cannot be spread over 3"),
    (
        [{"step": 1, "layers": [FULL | {"backward_weight_seconds": 3.0}]}],
        r":1: frames\[0\].layers\[0\].backward_weight_seconds",
    ),
]
"""What a schema cannot say."""


@pytest.fixture
def read(tmp_path):
    def read_text(text):
        path = tmp_path / "trace.json"
        path.write_text(text)
        return read_trace(str(path))

    return read_text


def test_frames_hold_until_the_next(read):
    trace = read(json.dumps(GOOD[1]))
    assert trace.lengths == (4, 1)
    assert trace.num_steps == 5
    assert trace.frames[0].layers[1] == Cost(forward_seconds=2 / 3, backward_seconds=2 - 2 / 3)
    assert trace.frames[1].layers[1] == Cost(forward_seconds=1.0, backward_seconds=2.0)


def test_the_object_form_says_more(read):
    trace = read(json.dumps(GOOD[2]))
    assert (trace.num_steps, trace.lengths, trace.num_microbatches) == (9, (9,), 4)
    assert (trace.embedding.seconds, trace.head.seconds) == (1.0, 2.0)
    assert trace.frames[0].layers[0].moved_bytes == 4
    assert read(json.dumps(GOOD[3])).layout == Layout.contiguous((1, 1))
    assert read(json.dumps(GOOD[3])).p2p_seconds == 0.1


@pytest.mark.parametrize(("data", "told"), BAD + INCONSISTENT)
def test_errors_name_file_line_and_field(read, data, told):
    with pytest.raises(ConfigError, match=f"trace.json.*{told}"):
        read(json.dumps(data))


def test_errors_name_the_line_of_a_frame(read):
    with pytest.raises(ConfigError, match=r"trace.json:3: frames\[1\].layers\[1\]: expected at least 0, got -1"):
        read('[\n{"step": 1, "layers": [1, 2]},\n{"step": 2, "layers": [1, -1]}\n]')
    with pytest.raises(ConfigError, match=r"trace.json:2: "):
        read('[\n{"step": 1 "layers": [1]}]')


@pytest.mark.parametrize("kind", KINDS)
def test_a_written_trace_is_read_back_equal(tmp_path, kind):
    path = str(tmp_path / "trace.json")
    trace = replace(
        generate(kind, (LAYER,) * 8, num_stages=4, num_steps=60), head=LAYER, layout=Layout.contiguous((2, 2, 2, 2))
    )
    write_trace(trace, "--write-trace", path)
    assert read_trace(path) == trace


def test_a_folder_cannot_be_written_nor_read(tmp_path):
    with pytest.raises(ConfigError, match="--write-trace"):
        write_trace(generate("moe", (LAYER,) * 2, num_stages=2, num_steps=1), "--write-trace", str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(str(tmp_path / "none.json"))


def validator():
    resource = Resource.from_contents(json.loads(schema_text()))
    registry = resource @ Registry()
    jsonschema.Draft202012Validator.check_schema(json.loads(trace_schema_text()))
    return jsonschema.Draft202012Validator(json.loads(trace_schema_text()), registry=registry)


def test_the_published_schema_allows_what_is_read_and_refuses_what_is_not(read):
    check = validator()
    for data in GOOD + [data for data, _ in INCONSISTENT]:
        assert check.is_valid(data), data
    for data in GOOD:
        read(json.dumps(data))
    for data, _ in BAD:
        assert not check.is_valid(data), data


def test_virtual_stages_come_back(tmp_path):
    trace = replace(
        generate("moe", [LAYER] * 8, num_stages=2, num_steps=3), layout=Layout.contiguous([2, 2, 2, 2], num_stages=2)
    )
    path = tmp_path / "trace.json"
    write_trace(trace, "--write-trace", str(path))
    assert read_trace(str(path)) == trace


def test_whole_floats_are_whole_numbers(tmp_path):
    path = tmp_path / "trace.json"
    frames = [{"step": 1.0, "layers": [FULL, FULL | {"state_bytes": 3.0}]}]
    path.write_text(json.dumps({"frames": frames, "steps": 9.0, "layout": "Et|tL", "num_stages": 2.0}))
    trace = read_trace(str(path))
    assert (trace.frames[0].step, trace.num_steps, trace.layout) == (1, 9, Layout.parse("Et|tL", 2))
    assert all(type(number) is int for number in (trace.frames[0].step, trace.num_steps, trace.frames[0].layers[1].state_bytes))
