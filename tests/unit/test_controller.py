"""Controller: whole rounds with threads as ranks and costs that change on command. No model, no sleeping."""

import logging
from functools import partial

import pytest
import torch

from megatron_dyn.config import DecideConfig, DynConfig, ForcedLayout, MeasureConfig, RebalancePolicy
from megatron_dyn.controller import Controller, Crew, State
from megatron_dyn.migrate import MemoryTransport, PlanMismatch, Seat, pack
from megatron_dyn.rebuild import RebuildError
from megatron_dyn.records import Layout, Outcome
from megatron_dyn.testing.fakes import FakeProfiler, MemoryStore, RecordingSink, small_layer
from megatron_dyn.testing.faults import Faults, Operation
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox, ThreadWorld

NUM_MICROBATCHES = 4
LIGHT, HEAVY = 0.01, 0.05


def uniform(step, layer):
    return LIGHT


def heavy_last_layer(step, layer, *, layer_id=7, since=0):
    return HEAVY if layer == layer_id and step >= since else LIGHT


def config_of(rebalance="off", *, interval=2, window=3, warmup=2, cooldown=5, forced=None):
    return DynConfig(
        rebalance=RebalancePolicy.parse(rebalance),
        layout_at=tuple(ForcedLayout(iteration=at, text=text) for at, text in (forced or {}).items()),
        measure=MeasureConfig(interval_steps=interval, window_samples=window, warmup_steps=warmup),
        decide=DecideConfig(cooldown_steps=cooldown),
    )


class Job:
    """A run without a model: one rank and one thread a stage; a step takes what the layer costs of its layout say."""

    def __init__(self, config, *, counts=(4, 4), costs=uniform, faults=None, last_step=400):
        self.config, self.costs, self.last_step = config, costs, last_step
        self.layout = Layout.contiguous(counts)
        self.world = ThreadWorld(self.layout.num_stages)
        faults = faults or Faults()
        self.mailbox = ThreadMailbox(faults=faults)
        ranks = tuple(range(self.world.size))
        self.stores = [MemoryStore(rank, self.layout.layers_of_stage(rank), faults=faults) for rank in ranks]
        self.seats = [Seat(global_rank=rank, pp_rank=rank, pipeline_ranks=ranks, device=torch.device("cpu")) for rank in ranks]
        self.profilers = [FakeProfiler(store, seat, costs) for store, seat in zip(self.stores, self.seats, strict=True)]
        self.sink = RecordingSink()
        self.forced = config.forced_layouts(num_layers=sum(counts), num_stages=len(counts))
        self.controllers = [self.controller(rank) for rank in ranks]
        self.trace = [[] for _ in ranks]

    def controller(self, rank, forced=None):
        crew = Crew(
            collective=ThreadCollective(self.world, rank),
            transport=MemoryTransport(rank, self.mailbox),
            store=self.stores[rank],
            seat=self.seats[rank],
            export=self.stores[rank].export,
            profiler=self.profilers[rank],
            sinks=(self.sink,) if rank == 0 else (),
        )
        return Controller(
            self.config,
            crew,
            layout=self.layout,
            forced=self.forced if forced is None else forced,
            last_step=self.last_step,
            tokens_per_step=1000,
        )

    def step_seconds(self, step, layout):
        busy = [
            sum(self.costs(step, layer) for layer in layout.layers_of_stage(pp_rank)) for pp_rank in range(layout.num_stages)
        ]
        return max(busy) * (NUM_MICROBATCHES + len(busy) - 1)

    def train(self, rank, first, last):
        controller = self.controllers[rank]
        controller.begin(first - 1)
        for step in range(first, last + 1):
            self.trace[rank].append(controller.layout.counts)
            controller.before_step(step)
            controller.after_step(step, self.step_seconds(step, controller.layout))
            controller.at_boundary(step)
        controller.close()

    def run(self, last, *, first=1):
        """Train; every rank must come through, in the same layouts, holding the layers that they say."""
        assert self.world.run(partial(self.train, first=first, last=last)) == [None] * self.world.size
        assert all(trace == self.trace[0] for trace in self.trace)
        layout = self.controllers[0].layout
        for rank, store in enumerate(self.stores):
            assert tuple(store.layers) == layout.layers_of_stage(rank)
            assert self.controllers[rank].layout == layout
        return self

    def commits(self):
        return [report for report in self.sink.rounds if report.outcome is Outcome.COMMIT]

    def rounds_at(self):
        return [report.iteration for report in self.sink.rounds]


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
        job = Job(config_of("auto", interval=4, window=2, warmup=3)).run(20)
        assert job.profilers[0].sampled_steps == job.profilers[1].sampled_steps == [4, 8, 12, 16, 20]
        assert job.rounds_at() == [8, 16]

    def test_no_step_of_the_warmup_after_start_or_move_is_sampled(self):
        job = Job(config_of("auto", interval=1, warmup=3, cooldown=0), costs=heavy_last_layer).run(20)
        (commit,) = job.commits()
        assert (commit.iteration, job.profilers[0].sampled_steps[:4]) == (6, [4, 5, 6, 10])

    def test_after_a_move_auto_waits_for_the_cooldown(self):
        def costs(step, layer):
            return HEAVY if layer == (7 if step < 25 else 0) else LIGHT

        job = Job(config_of("auto", cooldown=50), costs=costs).run(120)
        first, second = job.commits()
        assert second.iteration - first.iteration >= 50
        between = [report for report in job.sink.rounds if first.round < report.round < second.round]
        assert between
        assert all("cool-down" in report.reason for report in between)
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
        assert [report.reason for report in job.commits()] == [f"forced by --dyn-layout-at {at}" for at in self.FORCED]
        assert [profiler.sampled_steps for profiler in job.profilers] == [[], []]
        assert all(report.predicted_after_seconds is None for report in job.commits())

    def test_a_forced_layout_wins_over_rebalance(self):
        job = Job(config_of("auto", forced={5: "Et*7|tL"}), costs=heavy_last_layer).run(40)
        assert job.rounds_at() == [5]
        assert job.controllers[0].layout.counts == (7, 1)

    @pytest.mark.parametrize(("first", "counts"), [(6, (2, 6)), (10, (2, 6)), (11, (7, 1)), (99, (4, 4))])
    def test_a_resumed_run_begins_in_the_layout_that_is_due(self, first, counts):
        job = Job(config_of(forced=self.FORCED)).run(first, first=first)
        assert job.trace[0] == [counts]

    def test_a_fresh_run_begins_in_the_layout_of_iteration_0(self):
        job = Job(config_of(forced={0: "Et*3|t*5L"})).run(1)
        assert job.trace[0] == [(3, 5)]

    def test_a_layout_that_is_in_force_already_moves_nothing_and_is_reported(self):
        job = Job(config_of(forced={3: "Etttt|ttttL"})).run(6)
        (report,) = job.sink.rounds
        assert (report.outcome, report.reason) == (Outcome.NO_CHANGE, "--dyn-layout-at 3: already in force")
        assert job.world.num_meetings == 0

    def test_ranks_that_would_force_other_layouts_all_stop(self):
        job = Job(config_of(forced={3: "Et*3|t*5L"}))
        job.controllers[1] = job.controller(1, forced={3: Layout.contiguous([5, 3])})
        results = job.world.run(partial(job.train, first=1, last=5))
        assert [type(error) for error in results] == [PlanMismatch, PlanMismatch]
        assert [store.calls for store in job.stores] == [[], []]


class TestAbort:
    @pytest.mark.parametrize(
        ("operation", "rank", "blamed"),
        [(Operation.EXPORT, 0, 0), (Operation.PREPARE, 0, 0), (Operation.PREPARE, 1, 1), (Operation.CORRUPT, 0, 1)],
    )
    def test_an_abort_leaves_the_layout_and_training_goes_on(self, operation, rank, blamed):
        job = Job(config_of(forced={3: "Et*3|t*5L", 6: "Et*2|t*6L"}), faults=Faults().plan(operation, rank)).run(8)
        abort, commit = job.sink.rounds
        assert (abort.outcome, abort.layout_before, abort.layout_after) == (Outcome.ABORT, "Et*4|t*4L", "Et*4|t*4L")
        assert "(forced by --dyn-layout-at 3)" in abort.reason
        assert abort.reason.startswith(f"rank {blamed}: ")
        assert (commit.outcome, commit.layout_before) == (Outcome.COMMIT, "Et*4|t*4L")
        assert job.trace[0] == [(4, 4)] * 6 + [(2, 6)] * 2

    def test_an_abort_starts_the_cooldown_and_the_move_comes_after_it(self):
        faults = Faults().plan(Operation.PREPARE, 1)
        job = Job(config_of("auto", cooldown=30), costs=heavy_last_layer, faults=faults).run(80)
        abort = next(report for report in job.sink.rounds if report.outcome is Outcome.ABORT)
        (commit,) = job.commits()
        assert commit.iteration - abort.iteration >= 30
        assert job.profilers[0].num_layout_changes == 1

    def test_a_commit_that_fails_ends_the_job_on_every_rank(self):
        faults = Faults().plan(Operation.ATTACH, 1)
        job = Job(config_of(forced={3: "Et*3|t*5L"}), faults=faults)
        results = job.world.run(partial(job.train, first=1, last=5))
        assert [type(error) for error in results] == [RebuildError, RebuildError]
        assert job.commits() == []


class TestReport:
    def test_a_commit_says_what_moved_and_what_it_took(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(5)
        (report,) = job.commits()
        assert [(move.layer, move.source, move.destination) for move in report.moves] == [(2, 0, 1), (3, 0, 1)]
        assert (report.round, report.iteration, report.tokens_per_step) == (1, 5, 1000)
        assert report.moved_bytes == sum(pack(small_layer(layer))[0].total_bytes for layer in (2, 3))
        assert report.moving_seconds > 0

    def test_the_step_time_before_is_that_of_the_steps_that_were_not_sampled(self):
        job = Job(config_of("at:8"), costs=heavy_last_layer).run(20)
        (report,) = job.commits()
        assert report.measured_before_seconds == job.step_seconds(1, Layout.contiguous([4, 4]))
        assert report.snapshot.step_seconds == report.measured_before_seconds
        assert report.predicted_after_seconds < report.predicted_before_seconds == report.measured_before_seconds

    def test_the_step_time_after_completes_the_same_round(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(20)
        first, second = job.sink.written
        assert (first.round, first.measured_after_seconds) == (second.round, None)
        assert second.measured_after_seconds == job.step_seconds(1, Layout.contiguous([2, 6]))
        assert len(job.sink.rounds) == 1

    def test_a_round_is_completed_before_the_next_is_written(self):
        job = Job(config_of(forced={5: "Et*2|t*6L", 9: "Et*4|t*4L"})).run(9)
        assert [(report.round, report.measured_after_seconds is None) for report in job.sink.written] == [
            (1, True),
            (1, False),
            (2, True),
        ]

    def test_close_completes_what_is_pending_and_can_be_called_again(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(8)
        assert [report.measured_after_seconds is None for report in job.sink.written] == [True, False]
        job.controllers[0].close()
        assert len(job.sink.written) == 2
        assert job.sink.num_closed == 2

    def test_close_before_any_step_leaves_the_round_as_it_is(self):
        job = Job(config_of(forced={5: "Et*2|t*6L"})).run(5)
        assert [report.measured_after_seconds for report in job.sink.written] == [None]

    def test_time_spent_measuring_is_told_once(self):
        job = Job(config_of("every:10")).run(20)
        first, second = job.sink.rounds
        assert 0 < first.measuring_seconds < 5
        assert 0 < second.measuring_seconds < 5


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
