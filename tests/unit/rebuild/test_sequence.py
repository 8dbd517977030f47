"""Rebuild: all ranks vote before anything changes; then all change, or the job ends."""

from dataclasses import replace

import pytest

from megatron_dyn.migrate import Staged
from megatron_dyn.plan import moves_between
from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.rebuild import RebuildError, rebuild
from megatron_dyn.records import Layout, Plan
from megatron_dyn.testing.fakes import MemoryStore, small_layer
from megatron_dyn.testing.faults import Faults, Operation
from megatron_dyn.testing.threads import ThreadCollective, ThreadWorld

BEFORE, AFTER = Layout.contiguous([2, 2, 2]), Layout.contiguous([1, 3, 2])
PLAN = Plan(before=BEFORE, after=AFTER, moves=moves_between(BEFORE, AFTER), reason="test")
"""Layer 1 goes from stage 0 to stage 1; stage 2 is not affected."""


class Job:
    """Three stages, one rank each, with the arriving layers staged."""

    def __init__(self, plan=PLAN, *, faults=None, problems=(None, None, None), timeout_seconds=20.0):
        self.world = ThreadWorld(3, timeout_seconds=timeout_seconds)
        self.plan, self.problems = plan, problems
        self.stores = [MemoryStore(rank, plan.before.layers_of_stage(rank), faults=faults) for rank in range(3)]

    def rebuild(self, rank):
        arriving = [move.layer for move in self.plan.moves if move.destination == rank]
        states = {} if self.problems[rank] else {layer: small_layer(layer) for layer in arriving}
        return rebuild(
            self.plan,
            replace(Staged.nothing(), states=states),
            self.problems[rank],
            pp_rank=rank,
            store=self.stores[rank],
            collective=ThreadCollective(self.world, rank),
        )

    def run(self):
        return self.world.run(self.rebuild)

    def names(self):
        """The operations that each rank's store was asked for, in order."""
        return [[name for name, _ in store.calls] for store in self.stores]

    def layers(self):
        return [tuple(store.layers) for store in self.stores]


def test_a_commit_detaches_publishes_attaches_and_then_rewraps():
    job = Job()
    results = job.run()
    assert job.stores[0].calls == [
        ("prepare", []),
        ("detach", (1,)),
        ("publish", AFTER),
        ("attach", ()),
        ("rewrap", None),
    ]
    assert job.stores[1].calls == [
        ("prepare", [1]),
        ("detach", ()),
        ("publish", AFTER),
        ("attach", (1,)),
        ("rewrap", None),
    ]
    assert job.layers() == [AFTER.layers_of_stage(rank) for rank in range(3)]
    assert [result.layout for result in results] == [AFTER] * 3
    assert [(result.committed, result.problem) for result in results] == [(True, None)] * 3
    assert [result.detached_layers for result in results] == [(1,), (), ()]
    assert [result.attached_layers for result in results] == [(), (1,), ()]


def test_a_stage_that_is_not_affected_is_not_rewrapped_but_publishes():
    job = Job()
    job.run()
    assert job.names()[2] == ["prepare", "detach", "publish", "attach"]
    assert job.stores[2].layout == AFTER
    assert job.layers()[2] == BEFORE.layers_of_stage(2)


def test_a_stage_whose_layers_only_change_places_among_its_own_chunks_is_rewrapped_too():
    before, after = Layout.contiguous([1, 0, 1, 1, 1, 1], num_stages=3), Layout.contiguous([1, 1, 0, 1, 0, 2], num_stages=3)
    # Layer 1 goes from stage 2 to 1 and layer 3 from stage 1 to 2; layers 0 and 2 stay on stage 0.
    job = Job(Plan(before=before, after=after, moves=moves_between(before, after), reason="test"))
    assert [result.committed for result in job.run()] == [True] * 3
    assert ["rewrap" in names for names in job.names()] == [False, True, True]

    before, after = Layout.contiguous([2, 0, 0, 1, 1, 2], num_stages=3), Layout.contiguous([1, 0, 0, 2, 1, 2], num_stages=3)
    # Layer 1 stays on stage 0, and goes from its first chunk to its second.
    plan = Plan(before=before, after=after, moves=moves_between(before, after), reason="test")
    assert plan.moves == ()
    job = Job(plan)
    job.run()
    assert ["rewrap" in names for names in job.names()] == [True, False, False]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_no_on_any_rank_discards_on_all_and_commits_nowhere(rank):
    problems = [None, None, None]
    problems[rank] = "layer 1: checksum differs"
    job = Job(problems=problems)
    results = job.run()
    expected = [["prepare", "discard"]] * 3
    expected[rank] = ["discard"]
    assert job.names() == expected
    assert job.layers() == [BEFORE.layers_of_stage(index) for index in range(3)]
    assert [store.layout for store in job.stores] == [None] * 3
    for result in results:
        assert (result.committed, result.layout) == (False, BEFORE)
        assert (result.attached_layers, result.detached_layers) == ((), ())
        assert result.problem == f"rank {rank}: layer 1: checksum differs"


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_failing_prepare_is_a_no_that_names_the_error(rank):
    job = Job(faults=Faults().plan(Operation.PREPARE, rank))
    results = job.run()
    told = f"rank {rank}: InjectedFault: injected fault: prepare on rank {rank}"
    assert [result.problem for result in results] == [told] * 3
    assert job.names() == [["prepare", "discard"]] * 3
    # What was prepared before the failure is gone too: it would take memory until the next move.
    with pytest.raises(KeyError):
        job.stores[1].attach((1,))


def test_every_no_is_told_on_every_rank():
    results = Job(problems=("bad wire", None, "no memory")).run()
    assert {result.problem for result in results} == {"rank 0: bad wire; rank 2: no memory"}


@pytest.mark.parametrize("operation", [Operation.DETACH, Operation.PUBLISH, Operation.ATTACH, Operation.REWRAP])
def test_a_failing_commit_ends_the_job_on_all_ranks_with_the_same_words(operation):
    job = Job(faults=Faults().plan(operation, 1))
    results = job.run()
    assert [type(error) for error in results] == [RebuildError] * 3
    assert len({str(error) for error in results}) == 1
    assert "commit of layout Et|t*3|t*2L failed, restart from the last checkpoint" in str(results[0])
    assert f"rank 1: InjectedFault: injected fault: {operation.value} on rank 1" in str(results[0])


def test_a_rank_that_is_gone_ends_the_wait_for_its_vote_and_nothing_has_changed():
    job = Job(timeout_seconds=0.2)
    results = job.world.run(lambda rank: None if rank == 2 else job.rebuild(rank))
    for rank, error in enumerate(results[:2]):
        assert isinstance(error, CollectiveTimeout)
        assert f"rank {rank}: vote on the move: ranks [2] absent" in str(error)
    assert job.layers() == [BEFORE.layers_of_stage(rank) for rank in range(3)]
