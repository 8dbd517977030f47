"""Table: what a person reads on the console, with the numbers in it."""

from dataclasses import replace

import pytest
from rich.console import Console

from megatron_dyn.records import Layout, Outcome
from megatron_dyn.report import TableSink, render_round
from tests.unit.report.rounds import committed_round, no_change_round, small_snapshot


def shown(*reports, width=120):
    """The text that a TableSink prints for these reports, one after another."""
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=width, file=nowhere)
        sink = TableSink(console)
        for report in reports:
            sink.write(report)
        sink.close()
        return console.export_text()


def row_of(text, start):
    """The cells of the first table row that starts with `start`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.replace("\u2502", "|").strip("| ").split("|")]
        if cells[0].startswith(start) and len(cells) > 1:
            return cells
    raise AssertionError(f"no row {start!r} in\n{text}")


@pytest.mark.parametrize("width", [80, 120])
def test_a_commit_shows_every_cost_also_on_a_narrow_console(width):
    text = shown(committed_round(), width=width)
    assert "[megatron_dyn] round 3 after step 40: commit" in text
    assert row_of(text, "embedding") == ["embedding", "0", "4.00", "5.00", "0.0", "0.00"]
    assert row_of(text, "layer 1") == ["layer 1", "0", "20.00", "40.00", "2.0", "1.00"]
    assert row_of(text, "layer 2") == ["layer 2", "1", "30.00", "60.00", "3.0", "1.50"]
    assert row_of(text, "norm, head")[1:] == ["1", "50.00", "60.00", "7.0", "0.00"]
    assert row_of(text, "0") == ["0", "0-1", "0", "300.00", "0.250", "30%"]
    assert row_of(text, "1") == ["1", "2", "1-2", "500.00", "0.500", "0%"]


def test_a_commit_shows_the_layouts_and_what_the_round_took():
    text = " ".join(shown(committed_round()).split())
    assert "layout Et*2|tL -> Et|t*2L (1 layers moved)" in text
    assert "measured 2.000 s, predicted 1.400 s" in text
    assert "measuring 0.031 s, deciding 4.2 ms, moving 0.570 s (0.0 MiB, 0 MiB/s, 0.0 MiB more memory at the peak)" in text
    assert "saves 60 s in 100 steps" in text


@pytest.mark.parametrize("report", [committed_round(), no_change_round()], ids=["commit", "no change"])
def test_slow_ranks_and_stages_that_are_not_needed_are_told(report):
    text = shown(replace(report, speeds=(1.0, 0.5, None, 0.9), shrink_advice="3 of 4 stages would do"))
    assert "pp_rank 1 is slow: 0.50 times the median speed" in text
    assert text.count("is slow") == 1
    assert "3 of 4 stages would do" in text
    assert "slow" not in shown(report)


def test_the_measured_step_time_is_told_when_it_is_known_and_costs_are_not_repeated():
    text = " ".join(shown(committed_round(measured_after_seconds=1.6)).split())
    assert "round 3: step time under Et|t*2L measured 1.600 s (predicted 1.400 s), before 2.000 s" in text
    assert "1.25 times as fast, 500 -> 625 tokens/s" in text
    assert "layer 1" not in text


def test_the_verdict_of_a_forced_move_knows_no_prediction_and_no_time_before():
    report = committed_round(
        measured_after_seconds=1.6, measured_before_seconds=None, predicted_after_seconds=None, snapshot=None
    )
    text = shown(report)
    assert "measured 1.600 s" in text
    assert "predicted" not in text
    assert "times as fast" not in text


@pytest.mark.parametrize("reason", ["the current split [2, 1] is already the best", "[bold]not[/red] markup " * 9])
def test_no_change_is_one_line_with_the_reason_as_it_is(reason):
    text = shown(no_change_round(reason=reason), width=80)
    assert text == f"[megatron_dyn] round 4 after step 50: no change: {reason}\n"


def test_an_abort_says_so_and_keeps_the_layout():
    report = committed_round(outcome=Outcome.ABORT, reason="rank 1: [/no markup] lost", layout_after="Et*2|tL")
    text = shown(report)
    assert "after step 40: abort" in text
    assert "rank 1: [/no markup] lost" in text
    assert row_of(text, "0")[1:3] == ["0-1", "0-1"]


def test_a_round_without_measurements_has_no_tables():
    text = shown(committed_round(snapshot=None, predicted_before_seconds=None, predicted_after_seconds=None))
    assert "layer 1" not in text
    assert "moving 0.570 s" in text
    assert "predicted" not in text


def test_a_stage_without_layers_is_shown_as_such():
    assert row_of(shown(committed_round(layout_after="E|t*3L")), "0")[1:3] == ["0-1", "none"]


def test_layers_of_a_large_model_are_left_to_the_file():
    snapshot = small_snapshot()
    large = replace(snapshot, layers=snapshot.layers[:1] * 65, layout=Layout.contiguous([64, 1]))
    text = shown(committed_round(snapshot=large, layout_after=Layout.contiguous([63, 2]).text))
    assert "layer 0" not in text
    assert row_of(text, "norm, head, loss")[1] == "1"
    assert row_of(text, "0")[1:3] == ["0-63", "0-62"]


def test_a_round_can_be_rendered_without_a_sink():
    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=100, file=nowhere)
        console.print(render_round(committed_round()))
    assert "layer 2" in console.export_text()
