"""JSONL: one line a round and a step, appended, on disk at once."""

import json

import pytest

from megatron_dyn.report import JsonlSink, LossLog, ReportError, check_directory
from tests.unit.report.rounds import committed_round, no_change_round


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class TestJsonlSink:
    def test_one_line_a_round_readable_while_the_job_runs(self, tmp_path):
        sink = JsonlSink(str(tmp_path))
        for number in (1, 2, 3):
            sink.write(no_change_round(round=number))
            assert [line["round"] for line in lines_of(tmp_path / "rounds.jsonl")] == list(range(1, number + 1))
        sink.close()

    def test_a_round_written_again_replaces_its_line_and_no_other(self, tmp_path):
        sink = JsonlSink(str(tmp_path))
        sink.write(no_change_round(round=2))
        sink.write(committed_round(round=3))
        sink.write(committed_round(round=3, measured_after_seconds=1.5))
        sink.write(no_change_round(round=4))
        sink.close()
        lines = lines_of(tmp_path / "rounds.jsonl")
        assert [(line["round"], line["measured_after_seconds"]) for line in lines] == [(2, None), (3, 1.5), (4, None)]

    @pytest.mark.parametrize("reason", ["", "y" * 900, "\u4e2d"])
    def test_an_earlier_round_is_rewritten_in_its_place_with_the_later_lines_after_it(self, tmp_path, reason):
        sink = JsonlSink(str(tmp_path))
        for number in (1, 2, 3, 4):
            sink.write(committed_round(round=number, reason="\u00fc" * number))
        for number in (2, 1):
            sink.write(committed_round(round=number, reason=reason, measured_after_seconds=1.5))
        sink.write(no_change_round(round=5))
        sink.write(committed_round(round=4, measured_after_seconds=2.5, reason="z"))
        lines = lines_of(tmp_path / "rounds.jsonl")
        sink.close()
        assert [line["round"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["measured_after_seconds"] for line in lines] == [1.5, 1.5, None, 2.5, None]
        assert [line["reason"] for line in lines[:4]] == [reason, reason, "\u00fc" * 3, "z"]

    def test_rewriting_leaves_the_lines_of_an_earlier_job_as_they_are(self, tmp_path):
        earlier = '{"round": 1, "iteration": 9}\n{"round": 2, "iteration": 12}\n'
        (tmp_path / "rounds.jsonl").write_text(earlier)
        sink = JsonlSink(str(tmp_path))
        for number in (1, 2, 1):
            sink.write(committed_round(round=number))
        sink.close()
        text = (tmp_path / "rounds.jsonl").read_text()
        assert text.startswith(earlier)
        assert [line["round"] for line in lines_of(tmp_path / "rounds.jsonl")[2:]] == [1, 2]

    def test_a_shorter_line_leaves_nothing_of_the_longer_one(self, tmp_path):
        sink = JsonlSink(str(tmp_path))
        sink.write(committed_round(reason="x" * 500))
        sink.write(committed_round(reason="y"))
        sink.close()
        assert [line["reason"] for line in lines_of(tmp_path / "rounds.jsonl")] == ["y"]

    def test_letters_of_more_than_one_byte_do_not_shift_the_lines(self, tmp_path):
        sink = JsonlSink(str(tmp_path))
        for number in (1, 2):
            sink.write(committed_round(round=number, reason="\u00fc\u4e2d" * number))
            sink.write(committed_round(round=number, reason="\u4e2d" * number))
        sink.close()
        assert [line["reason"] for line in lines_of(tmp_path / "rounds.jsonl")] == ["\u4e2d", "\u4e2d\u4e2d"]

    def test_a_resumed_job_appends_even_when_its_rounds_count_from_one_again(self, tmp_path):
        for iteration in (10, 90):
            sink = JsonlSink(str(tmp_path))
            sink.write(committed_round(round=1, iteration=iteration))
            sink.write(committed_round(round=1, iteration=iteration, measured_after_seconds=1.5))
            sink.close()
        lines = lines_of(tmp_path / "rounds.jsonl")
        assert [(line["iteration"], line["measured_after_seconds"]) for line in lines] == [(10, 1.5), (90, 1.5)]

    def test_missing_directories_are_made(self, tmp_path):
        JsonlSink(str(tmp_path / "a" / "b")).close()
        assert (tmp_path / "a" / "b" / "rounds.jsonl").read_text() == ""

    def test_closing_twice_is_allowed(self, tmp_path):
        sink = JsonlSink(str(tmp_path))
        sink.close()
        sink.close()


@pytest.mark.parametrize("written_before", ['{"round": 1}\n{"round": 2, "iter', '{"round', "\n", '{"round": 1}\n', ""])
def test_a_line_that_a_killed_job_left_half_written_is_ended_and_the_next_one_is_whole(tmp_path, written_before):
    for name in ("rounds.jsonl", "losses.jsonl"):
        (tmp_path / name).write_text(written_before)
    sink, log = JsonlSink(str(tmp_path)), LossLog(str(tmp_path))
    sink.write(no_change_round())
    sink.write(no_change_round(reason="again"))
    log.write(7, {"lm loss": 1.0}, 1.0, "EttL")
    sink.close()
    log.close()
    expected_before = written_before if written_before.endswith("\n") or not written_before else f"{written_before}\n"
    for name, iteration in (("rounds.jsonl", 50), ("losses.jsonl", 7)):
        text = (tmp_path / name).read_text()
        assert text.startswith(expected_before)
        assert json.loads(text.removeprefix(expected_before))["iteration"] == iteration


@pytest.mark.parametrize(("opener", "name"), [(JsonlSink, "rounds.jsonl"), (LossLog, "losses.jsonl")])
def test_a_directory_that_cannot_be_written_is_refused_with_the_flag_the_path_and_the_cause(tmp_path, opener, name):
    # Below a file: refused for root too, unlike a directory without write permission.
    (tmp_path / "file").write_text("")
    directory = str(tmp_path / "file" / "reports")
    with pytest.raises(ReportError) as caught:
        opener(directory)
    assert str(caught.value).startswith(f"--dyn-report-dir {directory}: cannot write {name}: ")
    assert "directory" in str(caught.value).partition(name)[2].lower()


class TestCheckDirectory:
    def test_a_directory_that_can_be_written_is_made_and_left_empty(self, tmp_path):
        for _ in range(2):
            check_directory(str(tmp_path / "a" / "b"))
        assert list((tmp_path / "a" / "b").iterdir()) == []

    def test_one_that_cannot_be_made_is_refused_with_the_flag_and_the_path(self, tmp_path):
        (tmp_path / "file").write_text("")
        for directory in (tmp_path / "file", tmp_path / "file" / "reports"):
            with pytest.raises(ReportError, match=f"--dyn-report-dir {directory}: cannot be made: "):
                check_directory(str(directory))

    def test_one_without_write_permission_is_refused(self, tmp_path, monkeypatch):
        # The answer of the system is set by hand: root may write anywhere.
        monkeypatch.setattr("os.access", lambda path, mode: False)
        with pytest.raises(ReportError, match=f"--dyn-report-dir {tmp_path}: cannot be written"):
            check_directory(str(tmp_path))


class TestLossLog:
    def test_values_are_exact_in_hex_with_the_layout_in_force(self, tmp_path):
        log = LossLog(str(tmp_path))
        losses = {"lm loss": 0.1, "mtp loss": 2.5}
        log.write(7, losses, 1.0 / 3, "Et*2|tL")
        log.write(8, {}, None, "Et|t*2L")
        first, second = lines_of(tmp_path / "losses.jsonl")
        log.close()
        assert {name: float.fromhex(loss) for name, loss in first["losses"].items()} == losses
        assert (float.fromhex(first["grad_norm"]), first["iteration"], first["layout"]) == (1.0 / 3, 7, "Et*2|tL")
        assert second == {"iteration": 8, "losses": {}, "grad_norm": None, "layout": "Et|t*2L"}

    def test_a_loss_that_is_not_finite_is_still_a_line_of_json(self, tmp_path):
        log = LossLog(str(tmp_path))
        log.write(1, {"lm loss": float("nan")}, float("inf"), "EttL")
        log.close()
        (line,) = lines_of(tmp_path / "losses.jsonl")
        assert (line["losses"]["lm loss"], line["grad_norm"]) == ("nan", "inf")

    def test_a_resumed_job_appends(self, tmp_path):
        for iteration in (1, 2):
            log = LossLog(str(tmp_path))
            log.write(iteration, {"lm loss": 1.0}, 1.0, "EttL")
            log.close()
        assert [line["iteration"] for line in lines_of(tmp_path / "losses.jsonl")] == [1, 2]
