"""What the controller reports: each round once, completed when its step time is known, and never at the job's expense."""

import json
import logging

import pytest

from megatron_dyn.migrate import describe
from megatron_dyn.records import Layout, Outcome
from megatron_dyn.report import JsonlSink
from megatron_dyn.testing.fakes import small_layer
from megatron_dyn.testing.faults import Faults, Operation
from tests.unit.jobs import Job, config_of, heavy_last_layer


class FullDisk:
    """A sink as JsonlSink is on a full disk: no round can be written, and closing fails on what is left over."""

    num_closed = 0

    def write(self, report):
        raise OSError(28, "No space left on device")

    def close(self):
        self.num_closed += 1
        if self.num_closed == 1:
            raise OSError(28, "No space left on device")


class TestReport:
    def test_a_commit_says_what_moved_and_what_it_took(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(5)
        (report,) = job.commits()
        assert [(move.layer, move.source, move.destination) for move in report.moves] == [(2, 0, 1), (3, 0, 1)]
        assert (report.round, report.iteration, report.tokens_per_step) == (1, 5, 1000)
        assert report.moved_bytes == sum(describe(small_layer(layer)).num_bytes for layer in (2, 3))
        assert report.moving_seconds > 0

    def test_the_step_time_before_is_that_of_the_steps_that_were_not_sampled(self):
        job = Job(config_of("at:8"), costs=heavy_last_layer, hook_seconds=10.0).run(20)
        (report,) = job.commits()
        assert job.profilers[0].sampled_steps == [6, 7, 8]
        assert report.measured_before_seconds == job.step_seconds(1, Layout.contiguous([4, 4]))
        assert report.snapshot.step_seconds == report.measured_before_seconds
        assert report.predicted_after_seconds < report.predicted_before_seconds == report.measured_before_seconds

    @pytest.mark.parametrize("rebalance", ["auto", "every:3"])
    def test_a_job_that_samples_every_step_goes_by_those_steps(self, rebalance):
        config = config_of(rebalance, interval=1, window=3, warmup=0, cooldown=100)
        job = Job(config, costs=heavy_last_layer, hook_seconds=0.25).run(30)
        assert job.profilers[0].sampled_steps == list(range(1, 31))
        (commit,) = job.commits()
        assert commit.measured_before_seconds == job.step_seconds(1, Layout.contiguous([4, 4])) + 0.25
        assert commit.measured_after_seconds == job.step_seconds(1, job.controllers[0].layout) + 0.25

    def test_time_spent_measuring_is_told_once(self):
        job = Job(config_of("every:10")).run(20)
        first, second = job.sink.rounds
        assert 0 < first.measuring_seconds < 5
        assert 0 < second.measuring_seconds < 5


class TestStepTimeAfterACommit:
    def test_it_completes_the_same_round(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(20)
        first, second = job.sink.written
        assert (first.round, first.measured_after_seconds) == (second.round, None)
        assert second.measured_after_seconds == job.step_seconds(1, Layout.contiguous([2, 6]))
        assert len(job.sink.rounds) == 1

    @pytest.mark.parametrize(
        ("window", "last", "known"), [(3, 54, False), (3, 55, True), (40, 83, False), (40, 84, True), (40, 149, True)]
    )
    def test_it_is_told_after_the_warmup_and_a_window_of_steps_but_no_more_than_are_kept(self, window, last, known):
        # A move after step 50, two steps of warm-up, then as many as the window has or StepTimes keeps (32).
        job = Job(config_of("at:50", window=window), costs=heavy_last_layer).run(last, close=False)
        assert [report.measured_after_seconds is not None for report in job.sink.written] == [False, True][: 1 + known]

    def test_the_round_is_completed_before_the_next_is_written(self):
        job = Job(config_of(forced={5: "Et*2|t*6L", 9: "Et*4|t*4L"})).run(9)
        assert [(report.round, report.measured_after_seconds is None) for report in job.sink.written] == [
            (1, True),
            (1, False),
            (2, True),
        ]

    def test_a_round_without_a_change_in_the_warmup_does_not_lose_it(self):
        job = Job(config_of("at:6,7"), costs=heavy_last_layer).run(20)
        commit, no_change = job.sink.rounds
        assert (commit.outcome, no_change.outcome) == (Outcome.COMMIT, Outcome.NO_CHANGE)
        assert [(report.round, report.measured_after_seconds) for report in job.sink.written] == [
            (1, None),
            (2, None),
            (1, job.step_seconds(1, job.controllers[0].layout)),
        ]

    def test_an_abort_in_the_warmup_does_not_lose_it(self):
        # The second move, and only that, sends from rank 1.
        faults = Faults().plan(Operation.CORRUPT, 1)
        job = Job(config_of(forced={5: "Et*2|t*6L", 6: "Et*4|t*4L"}), faults=faults).run(20)
        commit, abort = job.sink.rounds
        assert (commit.outcome, abort.outcome) == (Outcome.COMMIT, Outcome.ABORT)
        assert (commit.measured_after_seconds, abort.measured_after_seconds) == (
            job.step_seconds(1, Layout.contiguous([2, 6])),
            None,
        )

    def test_a_commit_in_the_warmup_of_another_leaves_that_one_without(self):
        job = Job(config_of(forced={5: "Et*2|t*6L", 6: "Et*4|t*4L"})).run(20)
        first, second = job.commits()
        assert first.measured_after_seconds is None
        assert second.measured_after_seconds == job.step_seconds(1, Layout.contiguous([4, 4]))

    def test_the_line_is_rewritten_in_its_place_with_the_later_lines_after_it(self, tmp_path):
        Job(config_of("at:6,7"), costs=heavy_last_layer, more_sinks=(JsonlSink(str(tmp_path)),)).run(20)
        lines = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
        assert [(line["round"], line["outcome"]) for line in lines] == [(1, "commit"), (2, "no_change")]
        assert lines[0]["measured_after_seconds"] > 0

    def test_close_completes_what_is_pending_and_can_be_called_again(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(8)
        assert [report.measured_after_seconds is None for report in job.sink.written] == [True, False]
        job.controllers[0].close()
        assert len(job.sink.written) == 2
        assert job.sink.num_closed == 2

    def test_close_before_any_step_leaves_the_round_as_it_is(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(5)
        assert [report.measured_after_seconds for report in job.sink.written] == [None]


class TestSinkThatFails:
    FORCED = {2: "Et*3|t*5L", 4: "Et*2|t*6L"}

    def test_a_round_that_cannot_be_written_is_logged_and_the_job_and_the_other_sinks_go_on(self, caplog):
        with caplog.at_level(logging.ERROR, logger="megatron_dyn"):
            job = Job(config_of(forced=self.FORCED), more_sinks=(FullDisk(),)).run(6, close=False)
        errors = [record.getMessage() for record in caplog.records]
        assert errors == [f"round {number} could not be reported: [Errno 28] No space left on device" for number in (1, 2)]
        assert job.rounds_at() == [2, 4]
        assert job.trace[0][-1] == (2, 6)

    def test_one_that_cannot_be_closed_ends_no_job_and_keeps_no_other_open(self, caplog):
        disk = FullDisk()
        job = Job(config_of(forced=self.FORCED), more_sinks=(disk,)).run(6)
        assert (disk.num_closed, job.sink.num_closed) == (1, 1)
        assert "No space left on device" in caplog.records[-1].getMessage()
