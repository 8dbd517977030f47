"""Fewer stages in the answer of `plan`: cases C7 and C16 through the command."""

import json

import pytest

from megatron_dyn.cli.main import main

C7 = {
    "layers": [{"forward_seconds": 1, "backward_seconds": 0}] * 8 + [{"forward_seconds": 1, "backward_seconds": 2}] * 16,
    "layout": "Et*6|t*6|t*6|t*6L",
}
C16 = {"layers": [share for share in (1.0, 0.8, 0.6, 0.4) for _ in range(8)], "layout": "Et*8|t*8|t*8|t*8L"}


def plan(tmp_path, capsys, timing, *flags):
    path = tmp_path / "timing.json"
    path.write_text(json.dumps(timing))
    assert main(["plan", str(path), "--pp", "4", "--micro-batches", "2000", *flags]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("timing", "best", "bottleneck", "vs_best", "vs_today"),
    [(C7, 15.0, 20.0, 1 / 3, 1 / 9), (C16, 6.0, 8.0, 1 / 3, 0.0)],
    ids=["C7", "C16"],
)
def test_three_stages_are_priced_against_today_and_against_the_best(
    tmp_path, capsys, timing, best, bottleneck, vs_best, vs_today
):
    told = json.loads(plan(tmp_path, capsys, timing, "--json", "--shrink-policy", "throughput:0.3"))
    assert max(stage["seconds"] for stage in told["stages"]) == pytest.approx(best)
    three = told["sizes"]["smaller"][0]
    assert three["num_stages"] == told["sizes"]["chosen_num_stages"] == 3
    assert three["bottleneck_seconds"] == pytest.approx(bottleneck)
    assert three["longer_than_best"] == pytest.approx(vs_best, abs=2e-3)
    assert three["longer_than_today"] == pytest.approx(vs_today, abs=2e-3)


def test_people_see_both_comparisons_and_the_choice(tmp_path, capsys):
    out = plan(tmp_path, capsys, C7, "--shrink-policy", "throughput:0.3")
    assert "shrink: throughput:0.3: 3 stages would do: Et*" in out
    assert "+33.3%" in out and "+11.1%" in out
    out = plan(tmp_path, capsys, C7, "--shrink-policy", "throughput:0.1")
    assert "shrink: throughput:0.1: keep all stages" in out
    assert "shrink:" not in plan(tmp_path, capsys, C7)


def test_the_papers_packing_is_told_where_sizes_are_known(tmp_path, capsys):
    timing = {"layers": [{"seconds": 1.0, "state_bytes": 2**28}] * 8, "layout": "Et*2|t*2|t*2|t*2L"}
    told = json.loads(plan(tmp_path, capsys, timing, "--json", "--memory-gib", "1.2"))
    assert told["sizes"]["first_fit"] == [[0, 1], [2, 3]]
    assert told["sizes"]["smaller"][-1]["num_stages"] == 1
    assert "expected at most" in told["sizes"]["smaller"][-1]["refused"]


def test_with_virtual_stages_sizes_are_priced_when_asked_for(tmp_path, capsys):
    timing = {"layers": [1.0] * 8, "layout": "Et|t|t|t|t|t|t|tL", "num_stages": 4}
    few = ("--json", "--micro-batches", "8")
    assert json.loads(plan(tmp_path, capsys, timing, *few))["sizes"] is None
    assert json.loads(plan(tmp_path, capsys, timing, *few, "--shrink-policy", "efficiency"))["sizes"]["smaller"]


def test_a_policy_that_is_none_is_refused(tmp_path, capsys):
    path = tmp_path / "timing.json"
    path.write_text("[1, 2, 3]")
    assert main(["plan", str(path), "--pp", "3", "--shrink-policy", "throughput:2"]) == 2
    assert "error: --shrink-policy: expected a TOL in [0, 1), got 2.0" in capsys.readouterr().err


@pytest.mark.parametrize(("num_stages", "priced"), [(16, True), (17, False)])
def test_many_stages_are_priced_when_asked_for(tmp_path, capsys, num_stages, priced):
    path = tmp_path / "timing.json"
    path.write_text(json.dumps([1.0] * 17))
    words = ["plan", str(path), "--pp", str(num_stages), "--micro-batches", "16", "--json"]
    assert main(words) == 0
    assert bool(json.loads(capsys.readouterr().out)["sizes"]) is priced
