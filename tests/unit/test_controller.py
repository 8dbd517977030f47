"""Controller: whole rounds with threads as ranks and costs that change on command. No model, no sleeping."""

import logging
from dataclasses import replace
from functools import partial

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.controller import State
from megatron_dyn.measure import is_sampled
from megatron_dyn.migrate import PlanMismatch
from megatron_dyn.rebuild import RebuildError
from megatron_dyn.records import Layout, Outcome
from megatron_dyn.testing.faults import Faults, Operation
from tests.unit.jobs import HEAVY, LIGHT, Job, config_of, heavy_last_layer


class TestOff:
    def test_off_measures_nothing_meets_nowhere_and_reports_nothing(self):
        job = Job(config_of("off"), costs=heavy_last_layer).run(30)
        assert job.world.num_meetings == 0
        assert job.sink.written == []
        assert [profiler.sampled_steps for profiler in job.profilers] == [[], []]
        assert [store.calls for store in job.stores] == [[], []]
        assert job.controllers[0].state is State.IDLE


class TestAuto:
    def test_a_layer_that_becomes_heavy_makes_its_stage_lighter_and_then_all_is_quiet(self):
        job = Job(config_of("auto"), costs=partial(heavy_last_layer, since=30)).run(120)
        (commit,) = job.commits()
        assert job.trace[0][29] == (4, 4)
        assert commit.iteration >= 30
        assert job.controllers[0].layout.counts == (6, 2)
        assert job.controllers[0].layout_text == "Et*6|t*2L"

    @pytest.mark.parametrize(
        ("counts", "layer", "expected"), [((4, 4), 7, (6, 2)), ((4, 4), 0, (2, 6)), ((2, 2, 2, 2), 0, (1, 3, 2, 2))]
    )
    def test_a_skew_that_stays_makes_exactly_one_move(self, counts, layer, expected):
        job = Job(config_of("auto"), counts=counts, costs=partial(heavy_last_layer, layer_id=layer)).run(100)
        assert len(job.commits()) == 1
        if len(counts) == 2:
            assert job.controllers[0].layout.counts == expected
        assert job.step_seconds(1, job.controllers[0].layout) < job.step_seconds(1, Layout.contiguous(counts))

    def test_a_balanced_job_stays_as_it_is_and_says_why(self):
        job = Job(config_of("auto")).run(40)
        assert {report.outcome for report in job.sink.rounds} == {Outcome.NO_CHANGE}
        assert "already the best" in job.sink.rounds[0].reason
        assert [store.calls for store in job.stores] == [[], []]

    def test_one_step_in_so_many_is_sampled_and_a_round_comes_when_the_window_is_full(self):
        job = Job(config_of("auto", interval=4, window=2, warmup=0)).run(20)
        sampled = job.profilers[0].sampled_steps
        assert sampled == job.profilers[1].sampled_steps
        assert [(step - 1) // 4 for step in sampled] == [0, 1, 2, 3, 4]
        assert job.rounds_at() == [sampled[1], sampled[3]]

    @pytest.mark.parametrize("steps_at_a_place", [1, 2])
    def test_a_hot_spot_that_wanders_faster_than_the_samples_moves_nothing(self, steps_at_a_place):
        def costs(step, layer):
            return HEAVY if layer == step // steps_at_a_place % 8 else LIGHT

        job = Job(config_of("auto", interval=5, window=6, cooldown=0), costs=costs).run(400)
        assert job.commits() == []
        assert len(job.sink.rounds) == 13

    def test_a_burst_of_one_step_moves_nothing(self):
        for burst in range(3, 12):
            job = Job(config_of("auto"), costs=lambda step, layer, at=burst: HEAVY if (step, layer) == (at, 7) else LIGHT)
            assert job.run(20).commits() == []

    def test_a_change_that_is_known_to_come_ends_what_a_move_may_count_on(self):
        def moves_with(**decide):
            config = config_of("auto", interval=1, cooldown=0)
            config = replace(config, decide=replace(config.decide, **decide))
            return len(Job(config, costs=heavy_last_layer).run(20).commits())

        assert moves_with() == moves_with(cost_changes_at=(400,)) == 1
        assert moves_with(cost_changes_at=tuple(range(2, 40, 2))) == 0

    def test_after_a_known_change_of_costs_every_step_is_sampled_until_the_round_and_no_cooldown_holds_it_back(self):
        def costs(step, layer):
            return HEAVY if layer == (7 if step <= 20 else 0) else LIGHT

        job = Job(config_of("auto", interval=4, window=3, cooldown=100), costs=costs)
        job.told_at = (20,)
        job.run(30)
        assert [step for step in job.profilers[0].sampled_steps if step > 20][:3] == [21, 22, 23]
        first, second = job.commits()
        assert (first.iteration < 20, second.iteration) == (True, 23)
        assert second.snapshot.layers[0].seconds > 2 * second.snapshot.layers[7].seconds

    def test_the_line_of_a_move_is_completed_before_costs_change_and_then_left_alone(self):
        def costs(step, layer):
            return LIGHT * (10 if step > 12 else 1) * (5 if layer == 7 else 1)

        job = Job(config_of("auto", interval=1, window=3, warmup=0, cooldown=100), costs=costs)
        job.told_at = (12,)
        job.run(30)
        (commit, *_) = job.commits()
        assert commit.iteration < 9
        assert [report.measured_after_seconds for report in job.sink.written if report.round == commit.round][0] is None
        assert commit.measured_after_seconds == pytest.approx(job.step_seconds(12, Layout.parse(commit.layout_after, 2)))

    def test_no_step_of_the_warmup_after_start_or_move_is_sampled(self):
        job = Job(config_of("auto", interval=1, warmup=3, cooldown=0), costs=heavy_last_layer).run(20)
        (commit,) = job.commits()
        assert (commit.iteration, job.profilers[0].sampled_steps[:4]) == (6, [4, 5, 6, 10])

    def test_auto_makes_no_round_in_the_cooldown_but_samples_and_decides_as_soon_as_it_is_over(self):
        def costs(step, layer):
            return HEAVY if layer == (7 if step < 25 else 0) else LIGHT

        job = Job(config_of("auto", cooldown=50), costs=costs).run(107)
        assert [(report.iteration, report.outcome) for report in job.sink.rounds] == [
            (8, Outcome.COMMIT),
            (58, Outcome.COMMIT),
        ]
        warmups = (1, 2, 9, 10, 59, 60)
        sampled = [step for step in range(1, 108) if is_sampled(step, 2) and step not in warmups]
        assert job.profilers[0].sampled_steps == sampled
        assert job.controllers[0].layout.counts == (2, 6)


class TestScheduled:
    def test_every_comes_at_its_multiples_and_samples_just_before(self):
        job = Job(config_of("every:10")).run(25)
        assert job.rounds_at() == [10, 20]
        assert job.profilers[0].sampled_steps == [8, 9, 10, 18, 19, 20]

    def test_every_overrides_the_cooldown(self):
        def costs(step, layer):
            return HEAVY if layer == (7 if step <= 10 else 0) else LIGHT

        job = Job(config_of("every:10", cooldown=300), costs=costs).run(25)
        assert [report.iteration for report in job.commits()] == [10, 20]

    def test_at_comes_after_the_named_steps_and_never_again(self):
        job = Job(config_of("at:6,15"), costs=heavy_last_layer).run(40)
        assert job.rounds_at() == [6, 15]
        assert job.profilers[1].sampled_steps == [4, 5, 6, 13, 14, 15]
        assert [report.outcome for report in job.sink.rounds] == [Outcome.COMMIT, Outcome.NO_CHANGE]

    @pytest.mark.parametrize("rebalance", ["at:6", "every:6"])
    def test_a_round_whose_step_megatron_skips_comes_at_the_next_boundary(self, rebalance):
        job = Job(config_of(rebalance), costs=heavy_last_layer)

        def train(rank):
            controller = job.controllers[rank]
            for step in (1, 2, 3, 4, 5, 8, 9):
                controller.before_step(step)
                controller.after_step(step, 1.0)
                controller.at_boundary(step)

        job.world.run(train)
        assert job.rounds_at() == [8]

    def test_a_step_within_the_warmup_has_nothing_to_go_by_and_says_so(self):
        job = Job(config_of("at:2", warmup=2), costs=heavy_last_layer).run(6)
        (report,) = job.sink.rounds
        assert (report.outcome, report.snapshot) == (Outcome.NO_CHANGE, None)
        assert "nothing measured yet" in report.reason

    def test_the_last_step_moves_nothing(self):
        job = Job(config_of("at:10"), costs=heavy_last_layer, last_step=10).run(10)
        (report,) = job.sink.rounds
        assert (report.outcome, report.layout_after) == (Outcome.NO_CHANGE, "Et*4|t*4L")
        assert "about to end" in report.reason


class TestForced:
    FORCED = {5: "Et*2|t*6L", 10: "Et*7|tL", 15: "Et*4|t*4L"}

    def test_each_layout_is_in_force_from_the_step_after_on_and_nothing_is_measured(self):
        job = Job(config_of(forced=self.FORCED), costs=heavy_last_layer).run(20)
        expected = [(4, 4)] * 5 + [(2, 6)] * 5 + [(7, 1)] * 5 + [(4, 4)] * 5
        assert job.trace[0] == expected
        told = [(report.iteration, report.reason) for report in job.commits()]
        assert told == [(at, "forced by --dyn-layout-at") for at in self.FORCED]
        assert [profiler.sampled_steps for profiler in job.profilers] == [[], []]
        assert all(report.predicted_after_seconds is None for report in job.commits())

    def test_a_forced_layout_wins_over_rebalance(self):
        job = Job(config_of("auto", forced={5: "Et*7|tL"}), costs=heavy_last_layer).run(40)
        assert job.rounds_at() == [5]
        assert job.controllers[0].layout.counts == (7, 1)

    @pytest.mark.parametrize(
        ("first", "counts", "rounds_at"),
        [(5, (4, 4), [5]), (6, (2, 6), [5]), (10, (2, 6), [9, 10]), (11, (7, 1), [10]), (99, (4, 4), [])],
    )
    def test_a_resumed_run_begins_in_the_newest_layout_that_is_due(self, first, counts, rounds_at):
        job = Job(config_of(forced=self.FORCED)).run(first, first=first)
        assert job.trace[0] == [counts]
        assert job.rounds_at() == rounds_at

    @pytest.mark.parametrize(
        ("skipped", "rounds_at"), [(range(5, 8), [8, 10, 15]), (range(4, 12), [12, 15]), (range(2, 16), [])]
    )
    def test_of_the_layouts_that_fell_into_skipped_iterations_the_newest_is_brought_in_force_once(self, skipped, rounds_at):
        job = Job(config_of(forced=self.FORCED)).run(20, skipped=skipped)
        assert job.rounds_at() == rounds_at
        in_force = {8: (2, 6), 10: (7, 1), 12: (7, 1), 15: (4, 4)}
        assert [report.layout_after for report in job.commits()] == [Layout.contiguous(in_force[at]).text for at in rounds_at]
        assert job.trace[0][-1] == (4, 4)

    def test_a_fresh_run_begins_in_the_layout_of_iteration_0(self):
        job = Job(config_of(forced={0: "Et*3|t*5L"})).run(1)
        assert job.trace[0] == [(3, 5)]

    @pytest.mark.parametrize("at", [0, 3])
    def test_a_layout_that_is_in_force_already_makes_no_round_and_no_rank_waits(self, at):
        job = Job(config_of(forced={at: "Etttt|ttttL"})).run(6)
        assert job.sink.written == []
        assert job.world.num_meetings == 0
        assert [store.calls for store in job.stores] == [[], []]

    def test_a_layout_that_was_aborted_is_not_tried_again(self):
        job = Job(config_of(forced={3: "Et*3|t*5L"}), faults=Faults().plan(Operation.PREPARE, 0)).run(9)
        assert [(report.iteration, report.outcome) for report in job.sink.rounds] == [(3, Outcome.ABORT)]

    def test_a_layout_that_moves_an_end_is_refused_at_start(self):
        config = config_of(forced={5: "Et*4|t*4L|"})
        config = replace(config, decide=replace(config.decide, allow_empty_stages=True))
        with pytest.raises(ConfigError, match="--dyn-layout-at 5"):
            Job(config, counts=(3, 3, 2))

    def test_ranks_that_would_force_other_layouts_all_stop(self):
        job = Job(config_of(forced={3: "Et*3|t*5L"}))
        job.controllers[1] = job.controller(1, forced={3: Layout.contiguous([5, 3])})
        results = job.world.run(partial(job.train, steps=range(1, 6)))
        assert [type(error) for error in results] == [PlanMismatch, PlanMismatch]
        assert [store.calls for store in job.stores] == [[("quiesce", None)]] * 2


class TestMove:
    def test_the_host_comes_to_rest_before_anything_leaves(self):
        job = Job(config_of(forced={2: "Et*3|t*5L"}))
        store, export = job.stores[0], job.stores[0].export

        def noted(layer):
            store.calls.append(("export", layer))
            return export(layer)

        store.export = noted
        job.run(3)
        committed = ["prepare", "detach", "publish", "attach", "rewrap"]
        assert [name for name, _ in store.calls] == ["quiesce", "export", *committed]
        assert [name for name, _ in job.stores[1].calls] == ["quiesce", *committed]

    def test_what_is_under_way_at_a_time_is_what_the_configuration_says(self):
        job = Job(config_of(forced={2: "Et*3|t*5L"}, bucket_bytes=7))
        sizes, put = [], job.mailbox.put

        def noted(source, destination, tag, buffer):
            sizes.append(buffer.numel())
            put(source, destination, tag, buffer)

        job.mailbox.put = noted
        job.run(2)
        assert max(sizes) == 7
        assert sum(sizes) == sum(report.moved_bytes for report in job.commits())

    @pytest.mark.parametrize(("peaks", "expected"), [((10, 30), 30), ((30, None), None)])
    def test_the_largest_peak_of_all_ranks_is_told_or_none_where_one_cannot_tell(self, peaks, expected):
        job = Job(config_of(forced={2: "Et*3|t*5L"}))
        for memory, peak in zip(job.memories, peaks, strict=True):
            memory.extra_bytes = peak
        (commit,) = job.run(3).commits()
        assert commit.peak_extra_bytes == expected


class TestAbort:
    @pytest.mark.parametrize(
        ("operation", "rank", "blamed"),
        [(Operation.EXPORT, 0, 0), (Operation.PREPARE, 0, 0), (Operation.PREPARE, 1, 1), (Operation.CORRUPT, 0, 1)],
    )
    def test_an_abort_leaves_the_layout_and_training_goes_on(self, operation, rank, blamed):
        job = Job(config_of(forced={3: "Et*3|t*5L", 6: "Et*2|t*6L"}), faults=Faults().plan(operation, rank)).run(8)
        abort, commit = job.sink.rounds
        assert (abort.outcome, abort.layout_before, abort.layout_after) == (Outcome.ABORT, "Et*4|t*4L", "Et*4|t*4L")
        assert (abort.iteration, commit.iteration) == (3, 6)
        assert abort.reason.endswith(" (forced by --dyn-layout-at)")
        assert abort.reason.startswith(f"rank {blamed}: ")
        assert (commit.outcome, commit.layout_before) == (Outcome.COMMIT, "Et*4|t*4L")
        assert job.trace[0] == [(4, 4)] * 6 + [(2, 6)] * 2

    def test_an_abort_starts_the_cooldown_and_the_move_comes_right_after_it(self):
        faults = Faults().plan(Operation.PREPARE, 1)
        job = Job(config_of("auto", cooldown=30), costs=heavy_last_layer, faults=faults).run(67)
        assert [(report.iteration, report.outcome) for report in job.sink.rounds] == [(8, Outcome.ABORT), (38, Outcome.COMMIT)]
        assert job.profilers[0].num_layout_changes == 1

    def test_a_commit_that_fails_ends_the_job_on_every_rank(self):
        faults = Faults().plan(Operation.ATTACH, 1)
        job = Job(config_of(forced={3: "Et*3|t*5L"}), faults=faults)
        results = job.world.run(partial(job.train, steps=range(1, 6)))
        assert [type(error) for error in results] == [RebuildError, RebuildError]
        assert job.commits() == []


class TestClose:
    def test_a_run_that_fails_in_a_sampled_step_leaves_no_hook_behind_and_counts_no_sample(self):
        job = Job(config_of("auto", warmup=0, interval=1))
        controller, profiler = job.controllers[0], job.profilers[0]
        controller.before_step(1)
        assert profiler.running
        controller.close()
        assert (profiler.running, profiler.sampled_steps) == (False, [])
        controller.close()
        assert profiler.num_cancelled == 1

    def test_a_run_that_ends_well_gives_up_no_step(self):
        job = Job(config_of("auto", warmup=0, interval=1)).run(8)
        assert [profiler.num_cancelled for profiler in job.profilers] == [0, 0]
        assert job.profilers[0].sampled_steps == list(range(1, 9))


class TestStates:
    def states(self, caplog, config, last, faults=None):
        """The states that rank 0 went through."""
        with caplog.at_level(logging.DEBUG, logger="megatron_dyn.controller"):
            job = Job(config, faults=faults).run(last)
        records = [record for record in caplog.records if record.threadName == "rank 0"]
        changes = [record.args for record in records if record.msg.startswith("state ")]
        assert all(ended == began for (_, ended), (began, _) in zip(changes, changes[1:], strict=False))
        return [state for _, state in changes], job.controllers[0].state

    @pytest.mark.parametrize(("faults", "middle"), [(None, "committed"), (Faults().plan(Operation.PREPARE, 0), "aborted")])
    def test_a_move_goes_through_all_of_them(self, caplog, faults, middle):
        passed, last = self.states(caplog, config_of(forced={2: "Et*3|t*5L"}), 3, faults)
        assert passed == ["planned", "staged", middle, "reported", "idle"]
        assert last is State.IDLE

    def test_measuring_lasts_until_the_round(self, caplog):
        passed, _ = self.states(caplog, config_of("at:4", window=1), 5)
        assert passed == ["measuring", "reported", "idle"]
