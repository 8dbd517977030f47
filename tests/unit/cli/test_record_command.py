"""What `record` writes is what `plan` reads, and planning from the report itself gives the same."""

import json
from dataclasses import replace

import pytest

from megatron_dyn.cli import record_command
from megatron_dyn.cli.document import Document
from megatron_dyn.records import Layout
from megatron_dyn.report import JsonlSink
from tests.unit.report.rounds import committed_round, no_change_round, small_snapshot


def report(folder, *rounds):
    """A folder as --dyn-report-dir leaves it."""
    sink = JsonlSink(str(folder))
    for entry in rounds:
        sink.write(entry)
    sink.close()


def plan(command, path):
    """The plan without what differs from run to run."""
    data = command("plan", path, "--pp", 2, "--json").json
    return {key: data[key] for key in ("layout", "stages", "step_seconds", "current", "notes")}


def test_a_recorded_round_can_be_planned_with(command, tmp_path):
    report(tmp_path / "reports", committed_round(), no_change_round())
    ran = command("record", tmp_path / "reports", "-o", tmp_path / "timing.json")
    assert ran.code == 0
    assert ran.out.startswith(f"wrote {tmp_path}/timing.json: ")
    planned = plan(command, tmp_path / "timing.json")
    assert planned["current"]["layout"] == "Et*2|tL"
    assert planned["current"]["measured_step_seconds"] == 2.0
    assert planned == plan(command, tmp_path / "reports") == plan(command, tmp_path / "reports" / "rounds.jsonl")


def test_stdout_is_the_file(command, tmp_path):
    report(tmp_path, committed_round(), committed_round(round=8))
    assert "round 8" in command("record", tmp_path).json["source"]
    assert "round 3" in command("record", tmp_path, "--round", 3).json["source"]


def test_notes_of_the_reader_do_not_spoil_stdout(command, tmp_path):
    report(tmp_path, committed_round())
    (tmp_path / "rounds.jsonl").write_text('{"half\n' + (tmp_path / "rounds.jsonl").read_text())
    ran = command("record", tmp_path)
    assert json.loads(ran.out)["layout"] == "Et*2|tL"
    assert ran.err == f"megatron-dyn: note: {tmp_path}/rounds.jsonl:1: half a line, left out\n"


def test_a_report_without_such_a_round_is_refused(command, tmp_path):
    report(tmp_path, no_change_round())
    ran = command("record", tmp_path)
    assert ran.code == 2
    assert "expected a round that measured" in ran.err
    assert command("record", tmp_path / "nowhere").code == 2


ONE_STAGE = replace(small_snapshot(), layout=Layout.contiguous([3]), stages=small_snapshot().stages[:1])
FEWER = replace(small_snapshot(), layout=Layout.contiguous([1, 1]), layers=small_snapshot().layers[:2])
FREE = small_snapshot().layers[0]
UNTIMED = replace(small_snapshot(), layers=(replace(FREE, forward_seconds=0.0, backward_seconds=0.0), FREE, FREE))


@pytest.mark.parametrize("other", [ONE_STAGE, FEWER, UNTIMED], ids=["stages", "layers", "untimed"])
@pytest.mark.parametrize("first", [True, False])
def test_rounds_that_do_not_compare_are_no_reason_to_refuse(command, tmp_path, other, first):
    moved = committed_round(layout_before="Et|t*2L", snapshot=replace(small_snapshot(), layout=Layout.contiguous([1, 2])))
    rounds = [committed_round(layout_before=other.layout.text, snapshot=other), committed_round(), moved]
    ordered = rounds if first else rounds[1:] + rounds[:1]
    # A sink completes the line of a number that it has written before.
    report(tmp_path / "reports", *(replace(entry, round=number) for number, entry in enumerate(ordered, start=1)))
    assert len((tmp_path / "reports" / "rounds.jsonl").read_text().splitlines()) == 3
    assert command("record", tmp_path / "reports", "-o", tmp_path / "timing.json").code == 0
    data = json.loads((tmp_path / "timing.json").read_text())
    assert all(row["seconds"] > 0 and row["pp_rank"] < data["num_stages"] for row in data.get("observations", []))
    assert command("plan", tmp_path / "timing.json", "--pp", data["num_stages"]).code == 0


def test_what_plan_would_refuse_is_not_written(command, tmp_path, monkeypatch):
    impossible = {"layers": [1, 1], "layout": "Et|tL", "observations": [{"layer": 0, "pp_rank": 2, "seconds": 1}]}
    document = Document(name="f", data=impossible, line_of=lambda place: None)
    monkeypatch.setattr(record_command, "recorded_timing", lambda path, number: document)
    ran = command("record", tmp_path, "-o", tmp_path / "timing.json")
    assert (ran.code, (tmp_path / "timing.json").exists()) == (2, False)
    assert "observations[0].pp_rank: expected a rank below" in ran.err
