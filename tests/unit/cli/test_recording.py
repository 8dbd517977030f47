"""A timing file from a run's report: the very costs, layout and step that were measured, also over several rounds."""

import json
import math
from dataclasses import replace

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.recording import recorded_timing
from megatron_dyn.cli.timing_file import timing_of
from megatron_dyn.cli.verdicts import with_speeds
from megatron_dyn.plan.workload import workload_of
from megatron_dyn.records import Cost, Layout
from megatron_dyn.report import flatten
from tests.unit.report.rounds import committed_round, no_change_round, small_snapshot


def report(tmp_path, *rounds):
    """A report folder with these rounds."""
    lines = [line if isinstance(line, str) else json.dumps(flatten(line)) for line in rounds]
    (tmp_path / "rounds.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return str(tmp_path)


def test_a_round_becomes_a_timing_file(tmp_path):
    path = report(tmp_path, committed_round())
    file = timing_of(recorded_timing(path))
    snapshot = small_snapshot()
    assert file.layout == snapshot.layout
    assert file.num_microbatches == snapshot.num_microbatches
    assert file.measured_step_seconds == snapshot.step_seconds
    assert file.other_seconds == snapshot.other_seconds
    for ours, theirs in zip(
        (*file.layers, file.embedding, file.head), (*snapshot.layers, snapshot.embedding, snapshot.head), strict=True
    ):
        assert replace(ours, optimizer_seconds=0.0) == theirs
    assert not file.observations
    assert timing_of(recorded_timing(f"{path}/rounds.jsonl")).layers == file.layers


def test_the_optimizer_of_a_stage_is_shared_by_weight(tmp_path):
    whole = small_snapshot()
    stages = [replace(stage, state_bytes=size * 2**20) for stage, size in zip(whole.stages, (3, 10), strict=True)]
    measured = replace(whole, stages=tuple(stages))
    file = timing_of(recorded_timing(report(tmp_path, committed_round(snapshot=measured))))
    optimizer = [cost.optimizer_seconds for cost in file.layers]
    assert optimizer == [cost.optimizer_seconds for cost in workload_of(measured).layers]
    assert optimizer == pytest.approx([0.2 / 3, 0.4 / 3, 0.2 * 3 / 10])
    assert file.head.optimizer_seconds == pytest.approx(0.2 * 7 / 10)


def test_rounds_at_several_layouts_are_observations(tmp_path):
    moved = replace(small_snapshot(), layout=Layout.contiguous([1, 2]))
    later = committed_round(round=5, layout_before="Et|t*2L", snapshot=moved)
    document = recorded_timing(report(tmp_path, committed_round(), no_change_round(), later))
    file = timing_of(document)
    assert file.layout == moved.layout
    assert {(seen.layer, seen.pp_rank) for seen in file.observations} == {(0, 0), (1, 0), (1, 1), (2, 1)}
    assert "round 5" in document.data["source"]
    assert timing_of(recorded_timing(str(tmp_path), 3)).layout == small_snapshot().layout


def timed(counts, seconds, **changes):
    """A round of layers that take `seconds` under `counts`."""
    costs = [Cost(forward_seconds=value / 3, backward_seconds=value * 2 / 3) for value in seconds]
    snapshot = replace(small_snapshot(), layout=Layout.contiguous(counts), layers=tuple(costs))
    return committed_round(layout_before=snapshot.layout.text, snapshot=snapshot, **changes)


PRUNED = [timed([4, 2], [1.0] * 6), timed([3, 3], [0.6] * 6), timed([4, 2], [0.3] * 6)]
SLOW = [timed([4, 2], [1.0] * 4 + [2.0] * 2), timed([3, 3], [0.6] * 3 + [1.2] * 3)]


@pytest.mark.parametrize("number", [1, 2, 3])
def test_costs_that_drift_in_all_layers_are_no_slow_device(tmp_path, number):
    rounds = [replace(entry, round=index) for index, entry in enumerate(PRUNED, start=1)]
    file = timing_of(recorded_timing(report(tmp_path, *rounds), number))
    assert [seen.seconds for seen in file.observations] == pytest.approx([(1.0, 0.6, 0.3)[number - 1]] * 18)
    told, notes = with_speeds(file, 2)
    assert told.speeds is None
    assert not any("slow device" in note for note in notes)


def test_a_slow_device_is_found_through_the_drift(tmp_path):
    file, notes = with_speeds(timing_of(recorded_timing(report(tmp_path, *SLOW))), 2)
    assert file.speeds is not None
    assert file.speeds[1] / file.speeds[0] == pytest.approx(0.5)
    assert any(note.startswith("stage 1") and "slow device" in note for note in notes)


def test_what_all_chunks_of_a_stage_share_is_split(tmp_path):
    virtual = replace(small_snapshot(), layout=Layout.contiguous([1, 1, 1, 0], num_stages=2), other_seconds=1.0)
    document = recorded_timing(report(tmp_path, committed_round(layout_before=virtual.layout.text, snapshot=virtual)))
    assert document.data["other_seconds"] == 0.5
    assert document.data["num_stages"] == 2


def test_half_a_line_is_left_out_and_told(tmp_path):
    document = recorded_timing(report(tmp_path, '{"round": 1, "sche', committed_round(), ""))
    assert document.notes == (f"{tmp_path}/rounds.jsonl:1: half a line, left out",)


GOOD = flatten(committed_round())


@pytest.mark.parametrize(
    ("lines", "number", "message"),
    [
        ([no_change_round()], None, r"expected a round that measured .* measured rounds: none"),
        ([committed_round()], 7, r"expected round 7 .* measured rounds: 3"),
        (['{"iteration": 3, "losses": {}}'], None, "rounds.jsonl:1: expected a round as in docs/reports.md"),
        ([json.dumps(GOOD | {"schema_version": 2})], None, "rounds.jsonl:1: schema_version: expected 1, got 2"),
        ([json.dumps({key: value for key, value in GOOD.items() if key != "head"})], None, ":1: expected the field 'head'"),
        ([json.dumps(GOOD | {"stages": 3})], None, ":1: stages: expected a list"),
        ([json.dumps(GOOD | {"layout_before": "Et|tL"})], None, ":1: layout_before: .* .1 unassigned."),
        ([json.dumps(GOOD | {"layers": [1, 2, 3]})], None, r":1: layers\[0\]: expected an object, got 1"),
        ([json.dumps(GOOD | {"layers": [{}, {}, {}]})], None, r":1: layers\[0\]: expected the field 'forward_seconds'"),
        ([json.dumps(GOOD | {"head": 5})], None, ":1: head: expected an object, got 5"),
        ([json.dumps(GOOD | {"stages": [1, {}]})], None, r":1: stages\[0\]: expected an object, got 1"),
        (
            [json.dumps(GOOD | {"stages": [{"optimizer_seconds": "x"}, {}]})],
            None,
            r":1: stages\[0\].optimizer_seconds: expected a",
        ),
        ([json.dumps(GOOD | {"other_seconds": "x"})], None, ':1: other_seconds: expected a number, got "x"'),
        ([json.dumps(GOOD | {"other_seconds": math.nan})], None, ":1: other_seconds: expected a number, got NaN"),
        ([json.dumps(GOOD | {"step_seconds": 10**400})], None, ":1: step_seconds: expected a number, got 1000"),
        ([json.dumps(GOOD | {"round": True})], None, ":1: round: expected a whole number, got true"),
        ([json.dumps(GOOD | {"round": "a"})], None, ':1: round: expected a whole number, got "a"'),
        ([json.dumps(GOOD | {"round": None})], None, ":1: round: expected a whole number, got null"),
        ([json.dumps(GOOD | {"round": math.nan})], None, ":1: round: expected a whole number, got NaN"),
        ([json.dumps(GOOD | {"step_seconds": math.nan})], None, ":1: step_seconds: expected a number, got NaN"),
        (
            [json.dumps(GOOD | {"head": GOOD["head"] | {"state_bytes": math.nan}})],
            None,
            ":1: head.state_bytes: expected a number",
        ),
        ([json.dumps(GOOD | {"layout_before": 5})], None, ":1: layout_before: expected a text, got 5"),
    ],
)
def test_reports_without_such_a_round_are_refused(tmp_path, lines, number, message):
    with pytest.raises(InputError, match=message):
        recorded_timing(report(tmp_path, *lines), number)


def test_a_negative_cost_is_refused_with_the_line_of_its_round(tmp_path):
    bad = json.dumps(GOOD | {"head": {"forward_seconds": -1, "backward_seconds": 0}})
    with pytest.raises(InputError, match="rounds.jsonl:2: head.forward_seconds: expected at least 0, got -1"):
        timing_of(recorded_timing(report(tmp_path, no_change_round(), bad)))


def test_fields_that_a_later_report_adds_are_left_out(tmp_path):
    line = json.loads(json.dumps(GOOD))
    line["layers"][0]["new_seconds"] = 1
    assert timing_of(recorded_timing(report(tmp_path, json.dumps(line)))).layers[0].forward_seconds == 0.01


def test_a_round_numbered_by_a_whole_float_is_found(tmp_path):
    path = report(tmp_path, json.dumps(GOOD | {"round": 2.0}))
    assert ", round 2, " in recorded_timing(path, 2).data["source"]
