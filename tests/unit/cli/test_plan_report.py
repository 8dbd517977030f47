"""An answer in words and as JSON: layers once each, the gain only where there is one, and every algorithm with its figures."""

from dataclasses import replace
from itertools import chain

import pytest

from megatron_dyn.cli import plan_command
from megatron_dyn.cli.main import build_parser
from megatron_dyn.cli.plan_report import show_answer

BYTES = [{"seconds": 1, "state_bytes": 2**30, "activation_bytes": 2**27, "parameters": 10}] * 8


@pytest.fixture
def plan(command, timing):
    """Plan for a file of this content."""
    return lambda content, *words: command("plan", timing(content), *words)


def rows(out):
    """Cells of all table rows."""
    return [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in out.splitlines() if line.startswith("\u2502")]


def test_json_has_what_machines_need(plan):
    data = plan({"layers": BYTES, "layout": "Et*5|t*3L", "num_microbatches": 4}, "--pp", 2, "--json").json
    assert data["layout"] == "Et*4|t*4L"
    assert [stage["seconds"] for stage in data["stages"]] == pytest.approx([4, 4])
    assert [stage["memory_bytes"] for stage in data["stages"]] == [2**32 + 2 * 2**29, 2**32 + 2**29]
    assert sorted(chain.from_iterable(stage["layers"] for stage in data["stages"])) == list(range(8))
    assert data["step_seconds"] == pytest.approx(20)
    assert data["bubble"] == pytest.approx(0.2)
    assert [stage["bubble"] for stage in data["stages"]] == pytest.approx([0.2, 0.2])
    assert data["planning_seconds"] > 0
    assert data["moves"] == [{"layer": 4, "from": 0, "to": 1}]
    assert data["current"]["layout"] == "Et*5|t*3L"
    assert data["current"]["speedup"] == pytest.approx(data["current"]["step_seconds"] / 20)
    algorithms = {entry["algorithm"]: entry for entry in data["algorithms"]}
    assert {"exact", "partition", "diffusion", "megatron-uniform"} <= algorithms.keys()
    exact = algorithms["exact"]
    assert (exact["layout"], exact["gap_to_exact"], exact["bottleneck_seconds"]) == ("Et*4|t*4L", 0.0, pytest.approx(4))
    assert all("refused" in entry or entry["gap_to_exact"] >= 0 for entry in data["algorithms"])


def test_without_sizes_memory_is_unknown_and_not_zero(plan):
    data = plan([1, 1], "--pp", 2, "--json").json
    assert [stage["memory_bytes"] for stage in data["stages"]] == [None, None]
    assert data["current"] is None
    assert data["moves"] == []


def test_stages_that_take_no_time_wait_for_nothing(plan):
    data = plan([0, 0], "--pp", 2, "--json").json
    assert [stage["bubble"] for stage in data["stages"]] == [0, 0]


def test_people_see_layout_step_gain_and_tables(plan):
    out = plan({"layers": BYTES, "layout": "Et*5|t*3L", "num_microbatches": 4, "measured_step_seconds": 25}, "--pp", 2).out
    lines = out.splitlines()
    assert lines[0] == "layout: Et*4|t*4L"
    assert "step:   20 s simulated, bubble 20.0%, slowest stage 4 s a micro-batch (4 micro-batches, exact)" in lines
    assert any(line.startswith("now:    Et*5|t*3L:") and "25 s measured" in line for line in lines)
    assert any(line.startswith("gain:") and "1 of 8 layers move" in line for line in lines)
    # The first row of a name: that of the stages, not of fewer stages.
    table = {row[0]: row for row in reversed(rows(out))}
    assert table["0"] == ["0", "Et*4", "0-3", "4", "4", "5.00", "80.0%", "20.0%"]
    assert table["1"][2:6] == ["4-7", "4", "4", "4.50"]
    assert table["exact *"][1:3] == ["4", "0.0%"]
    assert "moves 1 layers" in table["exact *"][-1]


@pytest.mark.parametrize(
    ("layout", "algorithm", "words"),
    [
        ("Et*4|t*4L", "partition", "gain:   none, the current layout is what partition would make: no move"),
        ("Et*3|t*5L", "exact", "times as fast"),
    ],
)
def test_no_gain_no_move(plan, layout, algorithm, words):
    ran = plan({"layers": [1] * 8, "layout": layout}, "--pp", 2, "--algorithm", algorithm)
    assert words in ran.out


def answer_to(timing, *words):
    """The answer of `plan` before it is shown."""
    return plan_command.plan(build_parser().parse_args(["plan", str(timing), *words]))


@pytest.mark.parametrize(
    ("proved", "words"), [(True, "the current layout is already the best"), (False, "no better layout was found")]
)
def test_the_best_is_claimed_only_where_it_was_proved(timing, capsys, proved, words):
    answer = answer_to(timing({"layers": [1] * 8, "layout": "Et*4|t*4L"}), "--pp", "2")
    split = replace(answer.chosen.split, step_proved=proved)
    show_answer(replace(answer, chosen=replace(answer.chosen, split=split)))
    assert f"gain:   none, {words}: no move" in capsys.readouterr().out.splitlines()


def test_a_gap_that_rounds_to_nothing_has_no_sign(timing, capsys):
    answer = answer_to(timing([1, 1, 1, 1]), "--pp", "2")
    slower = [replace(entry.forecast, stage_seconds=(2 * (1 + 4e-4),) * 2) for entry in answer.compared[:1]]
    compared = (replace(answer.compared[0], forecast=slower[0]), *answer.compared[1:])
    show_answer(replace(answer, compared=compared))
    table = {row[0]: row for row in rows(capsys.readouterr().out)}
    assert table["partition"][2] == "0.0%"


def test_a_small_gain_is_told_and_moves_nothing(plan):
    file = {"layers": [1.0] * 7 + [0.95], "layout": "Et*4|t*4L", "head": 0.1}
    moved = plan(file | {"layout": "Et*3|t*5L"}, "--pp", 2, "--min-gain", 0.5)
    assert "% of the step, less than the 50.0% of --min-gain: no move" in moved.out
    assert plan(file | {"layout": "Et*3|t*5L"}, "--pp", 2, "--min-gain", 0.01, "--json").json["moves"]


def test_an_algorithm_that_would_make_it_worse_moves_nothing(plan):
    file = {"layers": [1] * 8, "head": 4, "layout": "Et*6|t*2L"}
    words = ("--pp", 2, "--algorithm", "megatron-uniform")
    assert "at least as fast: no move" in plan(file, *words).out
    data = plan(file, *words, "--json").json
    assert (data["moves"], data["current"]["worth_moving"]) == ([], False)


def test_over_the_cap_is_said(plan):
    layers = [BYTES[0] | {"state_bytes": 3 * 2**30}] * 2 + BYTES[2:]
    data = plan({"layers": layers, "num_microbatches": 2}, "--pp", 2, "--memory-gib", 7.5, "--json").json
    notes = {entry["algorithm"]: entry.get("note", "") for entry in data["algorithms"]}
    assert "over the memory cap" in notes["megatron-uniform"]
    assert notes["exact"] == ""
    assert max(stage["memory_bytes"] for stage in data["stages"]) <= 7.5 * 2**30


def test_what_is_proved_and_what_evaluation_takes(plan):
    data = plan({"layers": [1] * 8, "num_microbatches": 4}, "--pp", 2, "--json").json
    assert (data["step_proved"], data["bound_seconds"]) == (True, pytest.approx(4))
    assert data["forward_only_seconds"] == pytest.approx((4 + 1) * 4 / 3)
    out = plan({"layers": [1] * 8, "num_microbatches": 4}, "--pp", 2).out
    assert "eval:   6.667 s simulated for a step of evaluation, forward only" in out.splitlines()
    uniform = plan([1] * 5, "--pp", 2, "--micro-batches", 4, "--algorithm", "megatron-account", "--json").json
    assert (uniform["step_proved"], uniform["bound_seconds"]) == (False, pytest.approx(2.5))


def test_a_step_that_is_not_simulated_one_by_one_has_no_evaluation(plan, monkeypatch):
    monkeypatch.setattr("megatron_dyn.plan.proposals.MAX_OPERATIONS", 10)
    words = ("--pp", 8, "--micro-batches", 64)
    data = plan([1] * 8, *words, "--json").json
    assert data["forward_only_seconds"] is None
    assert "eval:" not in plan([1] * 8, *words).out


def test_exact_may_take_a_slower_stage_for_a_shorter_step(plan):
    layers, words = [1, 3, 5, 4, 4, 3, 4], ("--pp", 4, "--micro-batches", 2)
    entries = {entry["algorithm"]: entry for entry in plan(layers, *words, "--json").json["algorithms"]}
    exact, even = entries["exact"], entries["partition"]
    assert (exact["bottleneck_seconds"], even["bottleneck_seconds"]) == pytest.approx((9, 8))
    assert exact["step_seconds"] < even["step_seconds"]
    assert even["gap_to_exact"] == pytest.approx(8 / 9 - 1)
    out = " ".join(plan(layers, *words).out.split())
    assert "-11.1%" in out
    assert "gap to exact" not in out
