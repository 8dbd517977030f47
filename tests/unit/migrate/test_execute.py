"""Execute: layers arrive whole or not at all, and no rank waits for one that cannot come."""

import time
from dataclasses import replace
from importlib import import_module

import pytest
import torch

from megatron_dyn.migrate import MemoryTransport, PlanMismatch, Seat, execute
from megatron_dyn.plan import moves_between
from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.records import Layout, Plan
from megatron_dyn.testing.fakes import MemoryStore, small_layer
from megatron_dyn.testing.faults import Faults, Operation
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox, ThreadWorld

# The module: its name in the package is the function's.
EXECUTE = import_module("megatron_dyn.migrate.execute")
MOVES = [([4, 4], [2, 6]), ([2, 6], [7, 1]), ([2, 2, 2, 2], [1, 2, 3, 2]), ([3, 1, 1, 3], [0, 4, 4, 0])]


def plan_of(before, after):
    old, new = Layout.contiguous(before), Layout.contiguous(after)
    return Plan(before=old, after=new, moves=moves_between(old, new), reason="test")


class Pipelines:
    """`num_replicas` pipelines as threads. Ranks run replica fastest, as in Megatron."""

    def __init__(self, plan, *, num_replicas=1, faults=None, timeout_seconds=20.0):
        self.plan, self.num_replicas = plan, num_replicas
        self.world = ThreadWorld(plan.before.num_stages * num_replicas, timeout_seconds=timeout_seconds)
        faults = faults or Faults()
        self.mailbox = ThreadMailbox(timeout_seconds=timeout_seconds, faults=faults)
        self.stores = [
            MemoryStore(rank, plan.before.layers_of_stage(rank // num_replicas), faults=faults)
            for rank in range(self.world.size)
        ]

    def seat(self, rank):
        pp_rank, replica = divmod(rank, self.num_replicas)
        ranks = tuple(range(replica, self.world.size, self.num_replicas))
        return Seat(global_rank=rank, pp_rank=pp_rank, pipeline_ranks=ranks, device=torch.device("cpu"))

    def execute(self, rank, plan=None):
        return execute(
            plan or self.plan,
            self.seat(rank),
            self.stores[rank].export,
            collective=ThreadCollective(self.world, rank),
            transport=MemoryTransport(rank, self.mailbox),
        )

    def run(self):
        return self.world.run(self.execute)


def assert_same(actual, expected):
    assert (actual.layer, actual.scalars) == (expected.layer, expected.scalars)
    assert list(actual.tensors) == list(expected.tensors)
    for key, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[key], tensor), key


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_layers_that_change_their_stage_arrive_equal_and_nothing_else_changes(before, after):
    plan = plan_of(before, after)
    job = Pipelines(plan)
    results = job.run()
    for pp_rank, staged in enumerate(results):
        arriving = tuple(move.layer for move in plan.moves if move.destination == pp_rank)
        leaving = tuple(move.layer for move in plan.moves if move.source == pp_rank)
        assert tuple(staged.states) == staged.receipt.received_layers == arriving
        assert staged.receipt.sent_layers == leaving
        assert (staged.receipt.problem, staged.receipt.plan_digest) == (None, plan.digest)
        for layer, state in staged.states.items():
            assert_same(state, small_layer(layer))
        assert tuple(job.stores[pp_rank].layers) == plan.before.layers_of_stage(pp_rank)
        assert job.stores[pp_rank].calls == []
    assert len(job.mailbox) == 0


def test_what_is_sent_is_received_and_counted_in_bytes():
    receipts = [staged.receipt for staged in Pipelines(plan_of([4, 4], [2, 6])).run()]
    assert receipts[0].sent_bytes == receipts[1].received_bytes > 0
    assert receipts[1].sent_bytes == receipts[0].received_bytes == 0


def test_each_replica_gets_its_layers_from_its_own_pipeline():
    job = Pipelines(plan_of([2, 2], [1, 3]), num_replicas=2)
    for replica, store in enumerate(job.stores[:2]):
        store.layers[1] = replace(small_layer(1), scalars={"replica": replica})
    results = job.run()
    assert [staged.states[1].scalars for staged in results[2:]] == [{"replica": 0}, {"replica": 1}]


def test_ranks_with_other_plans_all_refuse_and_nothing_moves():
    job = Pipelines(plan_of([4, 4], [2, 6]))
    other = plan_of([4, 4], [3, 5])
    results = job.world.run(lambda rank: job.execute(rank, other if rank == 1 else None))
    assert [type(error) for error in results] == [PlanMismatch, PlanMismatch]
    for error in results:
        assert f"'{other.digest}': [1]" in str(error)
        assert f"'{job.plan.digest}': [0]" in str(error)
    assert len(job.mailbox) == 0


@pytest.mark.parametrize("layers", [1, 2])
def test_a_damaged_layer_is_a_problem_and_nothing_of_it_is_staged(layers):
    faults = Faults().plan(Operation.CORRUPT, 0)
    sender, receiver = Pipelines(plan_of([4, 4], [4 - layers, 4 + layers]), faults=faults).run()
    assert faults.struck == [(Operation.CORRUPT, 0)]
    assert f"layer {4 - layers}: checksum differs" in receiver.receipt.problem
    assert receiver.states == {}
    assert sender.receipt.problem is None


def test_every_damaged_layer_is_named():
    faults = Faults().plan(Operation.CORRUPT, 0).plan(Operation.CORRUPT, 0)
    _, receiver = Pipelines(plan_of([4, 4], [1, 7]), faults=faults).run()
    assert [f"layer {layer}:" in receiver.receipt.problem for layer in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_export_says_so_and_nobody_waits(rank):
    # Both stages send, so that each could wait for the other.
    job = Pipelines(plan_of([2, 2, 2, 2], [1, 4, 1, 2]), faults=Faults().plan(Operation.EXPORT, rank * 2))
    started = time.monotonic()
    results = job.run()
    assert time.monotonic() - started < job.world.timeout_seconds / 2
    problems = [staged.receipt.problem for staged in results]
    assert problems[rank * 2] == f"packing failed: InjectedFault: injected fault: export on rank {rank * 2}"
    assert [problem for index, problem in enumerate(problems) if index != rank * 2] == [None, None, None]
    assert all(staged.states == {} and staged.receipt.received_bytes == 0 for staged in results)
    assert len(job.mailbox) == 0


@pytest.mark.parametrize(("layer", "rank"), [(1, 1), (3, 2)])
def test_a_receiver_without_memory_says_so_before_anything_moves_and_nobody_waits(monkeypatch, layer, rank):
    # Rank 0 only sends, rank 1 sends and receives, rank 2 only receives: the two transfers hang together.
    def allocate(manifest, device):
        if manifest.layer == layer:
            raise torch.OutOfMemoryError("no memory")
        return torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device)

    monkeypatch.setattr(EXECUTE, "allocate", allocate)
    job = Pipelines(plan_of([2, 2, 2, 2], [1, 2, 3, 2]))
    started = time.monotonic()
    results = job.run()
    assert time.monotonic() - started < job.world.timeout_seconds / 2
    problems = [staged.receipt.problem for staged in results]
    assert problems[rank] == "making room failed: OutOfMemoryError: no memory"
    assert [problem for index, problem in enumerate(problems) if index != rank] == [None, None, None]
    for index, staged in enumerate(results):
        assert (staged.states, staged.receipt.plan_digest) == ({}, job.plan.digest)
        assert (staged.receipt.sent_layers, staged.receipt.received_layers) == ((), ())
        assert (staged.receipt.sent_bytes, staged.receipt.received_bytes) == (0, 0)
        assert tuple(job.stores[index].layers) == job.plan.before.layers_of_stage(index)
    assert len(job.mailbox) == 0


def test_every_rank_has_made_room_before_the_first_buffer_moves(monkeypatch):
    job = Pipelines(plan_of([4, 4], [2, 6]))
    sent_when_allocated = []

    def allocate(manifest, device):
        sent_when_allocated.append((manifest.layer, len(job.mailbox)))
        return torch.empty(manifest.total_bytes, dtype=torch.uint8, device=device)

    monkeypatch.setattr(EXECUTE, "allocate", allocate)
    _, receiver = job.run()
    assert sent_when_allocated == [(2, 0), (3, 0)]
    assert receiver.receipt.problem is None


def test_a_check_that_fails_is_a_problem_of_its_layer_and_nothing_is_staged(monkeypatch):
    def verify(manifest, buffer):
        if manifest.layer == 3:
            raise RuntimeError("no device")

    monkeypatch.setattr(EXECUTE, "verify", verify)
    sender, receiver = Pipelines(plan_of([4, 4], [2, 6])).run()
    assert receiver.receipt.problem == "layer 3: checking failed: RuntimeError: no device"
    assert receiver.states == {}
    assert sender.receipt.problem is None


def test_a_layer_that_never_arrives_ends_in_an_error_that_names_the_sender():
    job = Pipelines(plan_of([4, 4], [3, 5]), faults=Faults().plan(Operation.LOSE, 0), timeout_seconds=0.2)
    sender, receiver = job.run()
    assert sender.receipt.sent_layers == (3,)
    assert isinstance(receiver, CollectiveTimeout)
    assert "rank 1: receiving 3 from rank 0" in str(receiver)


def test_a_rank_that_is_gone_ends_in_an_error_that_names_what_was_waited_for():
    job = Pipelines(plan_of([4, 4], [3, 5]), timeout_seconds=0.2)
    results = job.world.run(lambda rank: None if rank == 1 else job.execute(rank))
    assert isinstance(results[0], CollectiveTimeout)
    assert "rank 0: plan and manifests: ranks [1] absent" in str(results[0])


def test_a_rank_that_is_gone_while_room_is_made_ends_in_an_error_too():
    job = Pipelines(plan_of([4, 4], [3, 5]), timeout_seconds=0.2)

    def run(rank):
        # Rank 1 agrees to the plan and dies.
        offer = EXECUTE.Offer(digest=job.plan.digest, problem=None, manifests={})
        return ThreadCollective(job.world, 1).gather(offer, "plan and manifests") if rank == 1 else job.execute(rank)

    results = job.world.run(run)
    assert isinstance(results[0], CollectiveTimeout)
    assert "rank 0: room for the layers: ranks [1] absent" in str(results[0])
    assert len(job.mailbox) == 0
