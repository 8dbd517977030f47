"""`megatron-dyn simulate` end to end, in this process; and its documentation."""

import json
import re
import shlex
from pathlib import Path

import pytest

DOC = Path(__file__).parents[3] / "docs" / "simulate.md"
C9 = '{"0-7": [0, 200], "8-15": [50, -1], "16-19": [10, 100]}'
C10 = ("--resize", "[{step0,size8},{step100,size4},{step200,size0}]", "--layers", "8", "--global-batch", "64")
SMALL = ("--layers", "8", "--pp", "4", "--micro-batches", "4")


def documented():
    blocks = re.findall(r"```sh\n(.*?)```", DOC.read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_every_documented_command_runs(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = documented()
    assert len(lines) == 5
    for program, *words in lines:
        ran = command(*words)
        assert (program, ran.code, ran.err) == ("megatron-dyn", 0, ""), words


def test_every_field_of_the_answers_is_documented(command):
    text = DOC.read_text()
    for words in (
        ("--kind", "stationary-skew", *SMALL, "--steps", "50"),
        ("--freeze-schedule", '{"0": 5}', *SMALL),
        (*C10, "--sizes", "8->(4,1,2),4->(2,1,2)"),
    ):
        answer = command("simulate", *words, "--json").json
        rows = next(value for value in answer.values() if isinstance(value, list) and value and isinstance(value[0], dict))
        assert {key for key in (*answer, *rows[0]) if f"`{key}`" not in text} == set()


def test_stationary_skew_moves_once_and_says_what_it_was_worth(command):
    answer = command("simulate", "--kind", "stationary-skew", "--layers", "16", "--pp", "4", "--steps", "300", "--json").json
    assert answer["num_moves"] == 1
    moves = [item for item in answer["rounds"] if item["outcome"] == "commit"]
    assert moves[0]["step_seconds_after"] < moves[0]["step_seconds_before"]
    assert answer["layout"] == moves[0]["layout"] != answer["layout_at_start"]
    assert answer["oracle_seconds"] <= answer["hindsight_seconds"] <= answer["policy_seconds"] < answer["static_seconds"]
    assert answer["speedup"] == pytest.approx(answer["static_seconds"] / answer["policy_seconds"])


def test_a_written_trace_gives_the_same_rounds(command, tmp_path):
    path = tmp_path / "trace.json"
    generated = command("simulate", "--kind", "moe", *SMALL, "--steps", "60", "--write-trace", path, "--json").json
    read = command("simulate", path, "--pp", "4", "--json").json
    assert read | {"trace": "moe"} == generated
    half = command("simulate", path, "--pp", "4", "--steps", "30", "--rebalance", "every:7", "--json").json
    assert [item["step"] for item in half["rounds"]] == [7, 14, 21, 28]
    assert half["num_steps"] == 30
    assert half["static_seconds"] == pytest.approx(read["static_seconds"] / 2, rel=0.1)


def test_flags_of_the_policy_reach_it(command):
    words = ("simulate", "--kind", "stationary-skew", "--layers", "16", "--pp", "4", "--steps", "120", "--json")
    rounds = command(*words, "--rebalance", "every:50", "--min-gain", "0.9").json["rounds"]
    assert [item["step"] for item in rounds] == [50, 100]
    assert "90.00% required" in rounds[0]["reason"]
    assert "in 2 steps" in command(*words, "--horizon-steps", "2").json["rounds"][0]["reason"]
    often = command(
        *words, "--profile-interval", "1", "--profile-window", "2", "--profile-warmup", "0", "--cooldown-steps", "9"
    )
    assert [item["step"] for item in often.json["rounds"][:2]] == [2, 11]
    assert command(*words, "--algorithm", "megatron-uniform").json["num_moves"] == 0


def test_reasons_name_the_flags_of_this_command(command):
    words = ("simulate", "--kind", "stationary-skew", "--layers", "16", "--pp", "4", "--steps", "120", "--min-gain", "0.9")
    assert command(*words, "--json").json["rounds"][0]["reason"].startswith("gain below --min-gain")
    assert "--dyn-" not in command(*words).out
    frozen = ("simulate", "--freeze-schedule", '{"0-7": [10, 500]}', "--layers", "24", "--pp", "4", "--min-gain", "0.9")
    assert "--min-gain" in command(*frozen, "--json").json["changes"][0]["reason"]
    assert "--dyn-" not in command(*frozen).out


def test_a_timing_file_says_what_layers_cost_at_full_load(command, timing):
    path = timing({"layers": [3, 3, 3, 3, 3, 3, 9, 3], "head": 3, "num_microbatches": 8, "layout": "Et*4|t*4L"})
    answer = command("simulate", "--kind", "mixture-of-depths", "--timing", path, "--json").json
    assert (answer["num_layers"], answer["num_microbatches"], answer["layout_at_start"]) == (8, 8, "Et*4|t*4L")
    ran = command("simulate", "--freeze-schedule", '{"0-1": -1}', "--timing", path)
    assert ran.code == 0
    assert "one third forward" in ran.err


def test_c9_prints_the_steps_where_costs_change(command):
    ran = command("simulate", "--freeze-schedule", C9, "--layers", "24", "--pp", "4", "--json")
    assert [item["step"] for item in ran.json["changes"]] == [0, 10, 50, 100, 200]
    assert ran.json["ends"] == "exclusive"
    assert ran.json["changes"][0]["rebuilt_stages"] == []
    assert all(item["rebuilt_stages"] for item in ran.json["changes"][1:])
    assert (
        "come after the last step"
        in command("simulate", "--freeze-schedule", C9, *SMALL[2:], "--layers", "24", "--steps", "60").err
    )


def test_c10_keeps_the_global_batch(command):
    rows = command("simulate", *C10, "--sizes", '{"8": [4, 1, 2], "4": [2, 1, 2]}', "--micro-batch-size", "4,8", "--json").json[
        "rows"
    ]
    assert [(row["size"], row["released_ranks"]) for row in rows] == [(8, []), (4, [4, 5, 6, 7]), (0, [0, 1, 2, 3])]
    assert [row["num_microbatches"] * row["micro_batch"] * row["grid"]["dp"] for row in rows[:2]] == [64, 64]


def test_sizes_and_maps_may_be_files(command, tmp_path):
    points, sizes = tmp_path / "points.json", tmp_path / "sizes.json"
    points.write_text(json.dumps([{"step": 0, "size": 8}, {"step": 100, "size": 4}]))
    sizes.write_text(json.dumps({"8": [4, 1, 2], "4": [2, 1, 2]}))
    ran = command("simulate", "--resize", points, "--sizes", sizes, *C10[2:], "--json")
    assert [row["size"] for row in ran.json["rows"]] == [8, 4]
    assert "none.json: cannot be read" in command("simulate", "--resize", "none.json", "--sizes", sizes, *C10[2:]).err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "expected one of TRACE, --kind, --freeze-schedule, --resize, got none"),
        (("--kind", "moe", "--freeze-schedule", C9), "got --kind and --freeze-schedule"),
        (("--kind", "moe", "--pp", "4"), "--layers: expected the number of layers"),
        (("--kind", "moe", "--layers", "8"), "--pp: expected the number of pipeline stages"),
        (("--kind", "moe", "--layers", "2", "--pp", "4"), "--pp: 4 stages need a layer each, the model has 2"),
        (("--kind", "moe", *SMALL, "--layout", "Et*4|t*3L"), "--layout: layout 'Et*4|t*3L': 2 stages cannot be spread"),
        (("--kind", "moe", *SMALL, "--layout", "Et|t|t|tL"), "--layout: layout 'Et|t|t|tL': places 4 layers"),
        (("--kind", "moe", *SMALL, "--layout", "t*2|t*2|t*2|t*2L"), "mbedding"),
        (("--kind", "moe", *SMALL, "--layout", "Et*2|t*2|t*2|t*2mL"), "MTP layers (m) are not supported"),
        (("--kind", "moe", *SMALL, "--rebalance", "often"), "expected off, auto, every:N or at:N1,N2, got 'often'"),
        (
            ("--kind", "moe", "--layers", "100", "--pp", "100", "--micro-batches", "5001"),
            "--pp 100, --micro-batches 5001: expected at most 1000000 forwards and backwards",
        ),
        (
            ("--freeze-schedule", '{"0": 5}', *SMALL, "--layout", "Et|t|t|t|t|t|t|tL", "--micro-batches", "65536"),
            "--pp 4, --micro-batches 65536: expected at most 1000000 forwards and backwards",
        ),
        (("--freeze-schedule", '{"0-8": 5}', *SMALL), "'0-8': layer 8 is unknown"),
        (
            ("--freeze-schedule", C9, *SMALL, "--write-trace", "x"),
            "--write-trace x: not with --freeze-schedule, only with TRACE or --kind",
        ),
        (C10, "--resize: expected --sizes beside it"),
        ((*C10[:4], "--sizes", "8->(4,1,2)"), "--resize: expected --global-batch beside it"),
        ((*C10, "--sizes", "8->(4,1,2)"), "step 100: size 4 is not in --sizes, which has 8"),
        ((*C10, "--sizes", "8->(4,3,1)"), "size 8: expected a multiple of pp * tp = 4 * 3 = 12"),
        ((*C10, "--sizes", "8->(8,1),4->(4,1)", "--micro-batch-size", "7"), "size 8: expected a micro-batch that divides 64"),
        ((*C10, "--sizes", "8->(4,1,2)", "--pp", "4"), "--pp 4: not with --resize"),
        ((*C10[:3], "4", "--global-batch", "64", "--sizes", "8->(8,1)"), "size 8: 8 stages need a layer each, the model has 4"),
        (("none.json", "--pp", "4"), "none.json: cannot be read"),
        (
            ("none.json", "--pp", "4", "--layers", "8"),
            "--layers 8: not with TRACE, only with --kind or --freeze-schedule or --resize",
        ),
        ((*C10, "--sizes", "8->(4,1,2)", "--steps", "3"), "--steps 3: not with --resize"),
        (("--freeze-schedule", C9, *SMALL, "--seed", "4"), "--seed 4: not with --freeze-schedule, only with --kind"),
    ],
)
def test_bad_input_is_refused_in_one_line(command, words, told):
    ran = command("simulate", *words)
    assert (ran.code, ran.out) == (2, "")
    assert told in ran.err
    assert ran.err.startswith("megatron-dyn: error: ")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("field", "value"), [("mtp", 1), ("speeds", [1, 2]), ("uncut", [1]), ("other_seconds", 1), ("p2p_seconds", 1)]
)
def test_what_a_simulation_would_ignore_is_refused(command, timing, field, value):
    path = timing({"layers": [1, 2, 3, 4], field: value})
    ran = command("simulate", "--kind", "moe", "--timing", path, "--pp", "2")
    assert ran.code == 2
    assert f"{field}: is not supported by this simulation" in ran.err


def test_more_that_does_not_fit(command, timing):
    path = timing([1, 2, 3, 4])
    assert "--layers 5: " in command("simulate", "--kind", "moe", "--timing", path, "--pp", "2", "--layers", "5").err
    assert "no state_bytes" in command("simulate", "--kind", "moe", "--timing", path, "--pp", "2", "--memory-gib", "1").err


def test_a_cap_that_nothing_meets_is_infeasible(command):
    ran = command("simulate", "--kind", "moe", *SMALL, "--steps", "5", "--memory-gib", "0.1")
    assert ran.code == 1
    assert ran.err.startswith("megatron-dyn: error: ")


def test_a_trace_with_another_number_of_stages_is_refused(command, tmp_path):
    path = tmp_path / "trace.json"
    path.write_text('{"frames": [{"step": 1, "layers": [1, 1]}], "layout": "Et|tL"}')
    assert command("simulate", path, "--steps", "3").code == 0
    assert "--pp 4: the layout 'Et|tL' in the file has 2 stages" in command("simulate", path, "--pp", "4").err


def test_a_written_trace_keeps_virtual_stages(command, timing, tmp_path):
    path = timing({"layers": [1] * 8, "layout": "Ett|tt|tt|ttL", "num_stages": 2, "num_microbatches": 8})
    written = tmp_path / "trace.json"
    words = ("--pp", "2", "--steps", "5", "--json")
    made = command("simulate", "--kind", "moe", "--timing", path, *words, "--write-trace", written).json
    assert command("simulate", written, "--pp", "2", "--json").json | {"trace": "moe"} == made


def test_a_freeze_schedule_cannot_follow_sends(command, timing):
    path = timing({"layers": [1, 2, 3, 4], "p2p_seconds": 1})
    ran = command("simulate", "--freeze-schedule", '{"0": 5}', "--timing", path, "--pp", "2")
    assert (ran.code, ran.out) == (2, "")
    assert "p2p_seconds: is not supported by this simulation" in ran.err


def test_sizes_that_cannot_be_added_up_are_refused_in_whatever_frame(command, tmp_path):
    light, heavy = ({"seconds": 1, "state_bytes": size} for size in (1, 2**50))
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([{"step": 1, "layers": [light] * 2200}, {"step": 3, "layers": [heavy] * 2200}]))
    ran = command("simulate", path, "--pp", "2", "--micro-batches", "2", "--memory-gib", "1e9")
    assert ran.code == 2
    assert ran.err.startswith("megatron-dyn: error: state_bytes and activation_bytes: expected at least 1 stage and sizes that")
    assert ran.err.count("\n") == 1
