"""Flatten: a round as plain data with stable keys."""

import json
from dataclasses import replace

import pytest

from megatron_dyn.records import SCHEMA_VERSION
from megatron_dyn.report import bubble_shares, flatten
from tests.unit.report.rounds import committed_round, no_change_round, small_snapshot

ROUND_KEYS = {
    "schema_version",
    "round",
    "iteration",
    "outcome",
    "reason",
    "layout_before",
    "layout_after",
    "moves",
    "predicted_before_seconds",
    "predicted_after_seconds",
    "predicted_cost_seconds",
    "measured_before_seconds",
    "measured_after_seconds",
    "tokens_per_second_before",
    "tokens_per_second_after",
    "moved_bytes",
    "measuring_seconds",
    "deciding_seconds",
    "moving_seconds",
    "moved_bytes_per_second",
    "peak_extra_bytes",
    "speeds",
    "shrink_advice",
}
SNAPSHOT_KEYS = {"step_seconds", "num_microbatches", "other_seconds", "layers", "embedding", "head", "stages"}
COST_KEYS = {"forward_seconds", "backward_seconds", "state_bytes", "activation_bytes", "moved_bytes"}


def test_the_keys_are_those_of_the_schema_and_a_snapshot_adds_its_own():
    assert flatten(no_change_round()).keys() == ROUND_KEYS
    line = flatten(committed_round())
    assert line.keys() == ROUND_KEYS | SNAPSHOT_KEYS
    assert line["embedding"].keys() == line["head"].keys() == COST_KEYS
    assert [row.keys() for row in line["layers"]] == [COST_KEYS | {"layer"}] * 3


def test_what_families_say_stands_with_its_layer():
    quiet = committed_round()
    notes = ({"prune": {"sparsity": 0.5}}, {}, {})
    line = flatten(replace(quiet, snapshot=replace(quiet.snapshot, notes=notes)))
    assert [row.get("dynamics") for row in line["layers"]] == [{"prune": {"sparsity": 0.5}}, None, None]


def test_a_round_survives_json():
    line = flatten(committed_round(measured_after_seconds=1.5))
    assert json.loads(json.dumps(line, allow_nan=False)) == line


def test_what_a_round_says():
    line = flatten(committed_round(measured_after_seconds=1.5))
    assert (line["schema_version"], line["round"], line["iteration"]) == (SCHEMA_VERSION, 3, 40)
    assert (line["outcome"], line["layout_before"], line["layout_after"]) == ("commit", "Et*2|tL", "Et|t*2L")
    assert line["moves"] == [{"layer": 1, "from": 0, "to": 1}]
    assert (line["moved_bytes"], line["predicted_after_seconds"]) == (4096, 1.4)
    assert (line["moved_bytes_per_second"], line["peak_extra_bytes"]) == (4096 / 0.57, 8192)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [(2.0, 1.5, (500.0, 1000 / 1.5)), (None, None, (None, None)), (0.0, 2.0, (None, 500.0))],
)
def test_tokens_per_second_are_known_when_the_step_time_is(before, after, expected):
    line = flatten(committed_round(measured_before_seconds=before, measured_after_seconds=after, tokens_per_step=1000))
    assert (line["tokens_per_second_before"], line["tokens_per_second_after"]) == expected


def test_layers_and_stages_come_in_order_with_their_numbers():
    line = flatten(committed_round())
    assert [(row["layer"], row["forward_seconds"]) for row in line["layers"]] == [(0, 0.01), (1, 0.02), (2, 0.03)]
    assert [(row["pp_rank"], row["wait_seconds"]) for row in line["stages"]] == [(0, 0.25), (1, 0.5)]
    assert line["head"]["backward_seconds"] == 0.06


def test_what_would_travel_and_what_belongs_to_no_piece_are_told():
    line = flatten(committed_round())
    assert [row["moved_bytes"] for row in line["layers"]] == [2**18, 2 * 2**18, 3 * 2**18]
    assert (line["head"]["moved_bytes"], line["other_seconds"]) == (2**16, 0.001)


def test_the_bubble_is_what_computing_and_optimizer_leave_of_the_step():
    # Stage 0: 4 micro-batches of 0.3 s and 0.2 s of optimizer in a step of 2 s; stage 1: more than the step.
    assert bubble_shares(small_snapshot(busy=((0.1, 0.2), (0.5, 0.5)))) == pytest.approx([0.3, 0.0])


def test_without_a_step_time_there_is_no_bubble():
    assert bubble_shares(small_snapshot(step_seconds=0.0)) == [0.0, 0.0]
