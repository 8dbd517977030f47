"""`plan` end to end: the public cases of users.md, files written, and refusals with their exit codes."""

import json
from itertools import chain

import pytest


def ids(data):
    """All layer ids of a plan."""
    return sorted(chain.from_iterable(stage["layers"] for stage in data["stages"]))


def slowest(data):
    return max(stage["seconds"] for stage in data["stages"])


def test_c1_stage_totals_of_a_large_model(command, timing):
    path = timing({"layout": "Et*18|t*24|t*24|t*12m*7L", "stages": [19.1, 25.6, 25.6, 29.7]})
    data = command("plan", path, "--pp", 4, "--json").json
    assert data["layout"] == "Et*24|t*23|t*23|t*8m*7L"
    assert slowest(data) == pytest.approx(25.5, abs=0.01)
    assert max(data["current"]["seconds"]) == pytest.approx(29.7)
    assert ids(data) == list(range(78))
    assert "inferred from stage totals" in data["notes"][0]
    assert "inferred from stage totals" in command("plan", path, "--pp", 4).out


@pytest.mark.parametrize(("num_layers", "pp", "best"), [(30, 4, 8), (5, 4, 2), (42, 16, 3), (38, 8, 5)])
def test_c3_and_c5_every_layer_once_and_none_empty(command, timing, num_layers, pp, best):
    data = command("plan", timing([1] * num_layers), "--pp", pp, "--json").json
    assert ids(data) == list(range(num_layers))
    assert all(stage["layers"] for stage in data["stages"])
    assert slowest(data) == pytest.approx(best)


def frozen(*ranges):
    """24 layers; those in the ranges take `backward` seconds less than 2 backward."""
    layers = [{"forward_seconds": 1, "backward_seconds": 2} for _ in range(24)]
    for span, backward in ranges:
        for layer in span:
            layers[layer]["backward_seconds"] = backward
    return {"layers": layers, "layout": "Et*6|t*6|t*6|t*6L"}


def test_c7_a_frozen_prefix_and_the_trap(command, timing):
    data = command("plan", timing(frozen((range(8), 0))), "--pp", 4, "--json").json
    assert data["current"]["seconds"] == pytest.approx([6, 14, 18, 18])
    assert slowest(data) == pytest.approx(15)
    trap = timing(frozen((range(4, 12), 1)))
    assert command("plan", trap, "--pp", 4).out.splitlines()[3].endswith(": no move")
    data = command("plan", trap, "--pp", 4, "--json").json
    assert max(data["current"]["seconds"]) == pytest.approx(18) == slowest(data)
    assert data["moves"] == []


def test_c14_equal_totals_and_different_advice(command, timing):
    layers = [{"seconds": 1, "kind": "dense"}] * 40
    slow = [*layers[:16], *[{"seconds": 2, "kind": "dense"}] * 8, *layers[:8]]
    a = command("plan", timing({"layers": slow, "layout": "Et*8|t*8|t*8|t*8L"}), "--pp", 4, "--json").json
    b = command("plan", timing({"layers": layers, "layout": "Et*8|t*8|t*16|t*8L"}), "--pp", 4, "--json").json
    for data in (a, b):
        assert data["current"]["seconds"] == pytest.approx([8, 8, 16, 8])
    assert slowest(a) == pytest.approx(10)
    assert [len(stage["layers"]) for stage in b["stages"]] == [10] * 4
    assert any("slow device" in note for note in a["notes"])
    assert any("heavy stage" in note for note in b["notes"])


def test_csv_virtual_stages_and_mtp(command, timing):
    text = "layer,seconds\nmtp,2\n" + "".join(f"{layer},1\n" for layer in range(14))
    data = command("plan", timing(text, "t.csv"), "--pp", 2, "--vpp", 2, "--micro-batches", 4, "--json").json
    assert (data["num_virtual"], slowest(data)) == (2, pytest.approx(8))
    assert data["layout"].endswith("mL")
    assert ids(data) == list(range(14))


def test_picture_and_trace_are_written_and_json_stays_alone(command, timing, tmp_path):
    path = timing([1, 1, 1])
    ran = command("plan", path, "--pp", 2, "--json", "--picture", tmp_path / "p.svg", "--trace", tmp_path / "t.json")
    assert (ran.code, ran.err) == (0, "")
    title = f"{ran.json['layout']}: step {ran.json['step_seconds']:.4g} s"
    assert title in (tmp_path / "p.svg").read_text()
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"][0]["args"]["name"].startswith(title)


def test_a_step_too_large_to_draw_is_said_with_the_flag(command, timing, monkeypatch, tmp_path):
    monkeypatch.setattr("megatron_dyn.plan.proposals.MAX_OPERATIONS", 10)
    ran = command("plan", timing([1, 1]), "--pp", 2, "--trace", tmp_path / "t.json")
    assert ran.code == 2
    assert "--trace: expected a step of at most" in ran.err


@pytest.mark.parametrize(
    ("content", "words", "code", "problem"),
    [
        ([1, 1], ["--pp", 3], 1, "--pp 3: expected at least 3 layers"),
        ([1, 1, 1], ["--pp", 2, "--algorithm", "megatron-uniform"], 1, "megatron-uniform: "),
        ([{"seconds": 1, "state_bytes": 2**31}], ["--pp", 1, "--memory-gib", 1], 1, "expected at most 1073741824 bytes"),
        ([1, -1], ["--pp", 2], 2, "timing.json:1: [1]: expected at least 0, got -1"),
        ([1, 1], ["--pp", 2, "--picture", "x.gif"], 2, "--picture: expected a path that ends in .svg or .png, got 'x.gif'"),
        (None, ["--pp", 1], 2, "timing.json:1: expected a list or an object, got null"),
        (True, ["--pp", 1], 2, "timing.json:1: expected a list or an object, got true"),
        (5, ["--pp", 1], 2, "timing.json:1: expected a list or an object, got 5"),
        ([1, 1], ["--pp", 16_385], 2, "argument --pp: expected a whole number from 1 to 16384, got '16385'"),
        ([1, 1], ["--pp", 2, "--vpp", 65_537], 2, "argument --vpp: expected a whole number from 1 to 65536"),
        (
            [1, 1],
            ["--pp", 2, "--micro-batches", 65_537],
            2,
            "argument --micro-batches: expected a whole number from 1 to 65536",
        ),
        (
            [1] * 16,
            ["--pp", 8, "--vpp", 2, "--micro-batches", 40_000],
            2,
            "--pp 8, --vpp 2, --micro-batches 40000: expected at most 1000000 forwards and backwards",
        ),
        ([1, 1], ["--pp", 0], 2, "argument --pp: expected a whole number"),
        ([1, 1], ["--pp", 2, "--algorithm", "best"], 2, "argument --algorithm: invalid choice"),
    ],
)
def test_refusals_have_one_line_and_their_code(command, timing, content, words, code, problem):
    ran = command("plan", timing(content), *words)
    assert (ran.code, ran.out) == (code, "")
    assert problem in ran.err.splitlines()[-1]
