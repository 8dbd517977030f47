"""Execute when something fails: nothing is staged, and no rank waits for a layer that cannot come."""

import time
from importlib import import_module

import pytest
import torch

from megatron_dyn.migrate import PlanMismatch, allocate, digest, flat_bytes
from megatron_dyn.migrate.offer import Offer
from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.testing.fakes import small_layer
from megatron_dyn.testing.faults import Faults, Operation
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox
from tests.unit.migrate.pipelines import NUM_TENSORS, Pipelines, layer_of, plan_of, rank_here, tag_of

# The module: its name in the package is the function's.
EXECUTE = import_module("megatron_dyn.migrate.execute")


class FlippingMailbox(ThreadMailbox):
    """Flips one bit of the buffer with tag `flipped`."""

    def __init__(self, flipped):
        super().__init__()
        self.flipped = flipped

    def put(self, source, destination, tag, buffer):
        if tag == self.flipped:
            buffer = buffer.clone()
            buffer[-1] ^= 0x80
        super().put(source, destination, tag, buffer)


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
def test_a_damaged_layer_is_a_problem_and_nothing_is_staged(layers):
    faults = Faults().plan(Operation.CORRUPT, 0)
    sender, receiver = Pipelines(plan_of([4, 4], [4 - layers, 4 + layers]), faults=faults).run()
    assert faults.struck == [(Operation.CORRUPT, 0)]
    expected = (
        f"layer {4 - layers} from rank 0: checksum differs, expected {digest(flat_bytes(small_layer(4 - layers))):#x}, got 0x"
    )
    assert receiver.receipt.problem.startswith(expected)
    assert receiver.states == {}
    assert sender.receipt.problem is None


@pytest.mark.parametrize("index", range(NUM_TENSORS))
def test_damage_to_any_tensor_of_a_layer_is_noticed(index):
    job = Pipelines(plan_of([4, 4], [2, 6]))
    for wire in job.wires:
        wire.mailbox = FlippingMailbox(tag_of(job.plan, 3, index)) if wire.rank == 0 else job.wires[0].mailbox
    sender, receiver = job.run()
    assert receiver.receipt.problem.startswith("layer 3 from rank 0: checksum differs")
    assert "; " not in receiver.receipt.problem
    assert (receiver.states, sender.receipt.problem) == ({}, None)


def test_two_tensors_that_arrive_in_each_others_place_are_noticed():
    class Swapping(ThreadMailbox):
        def put(self, source, destination, tag, buffer):
            # The fp32 copy and the moment, of the same size.
            super().put(source, destination, {1: 2, 2: 1}.get(tag, tag), buffer)

    job = Pipelines(plan_of([4, 4], [3, 5]))
    mailbox = Swapping()
    for wire in job.wires:
        wire.mailbox = mailbox
    _, receiver = job.run()
    assert receiver.receipt.problem.startswith("layer 3 from rank 0: checksum differs")


def test_every_damaged_layer_is_named():
    faults = Faults()
    # The whole of the first layer, and the first tensor of the next.
    for _ in range(NUM_TENSORS + 1):
        faults.plan(Operation.CORRUPT, 0)
    _, receiver = Pipelines(plan_of([4, 4], [1, 7]), faults=faults).run()
    assert [f"layer {layer} from rank 0:" in receiver.receipt.problem for layer in (1, 2, 3)] == [True, True, False]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_export_says_so_and_nobody_waits(rank):
    # Both stages send, so that each could wait for the other.
    job = Pipelines(plan_of([2, 2, 2, 2], [1, 4, 1, 2]), faults=Faults().plan(Operation.EXPORT, rank * 2))
    started = time.monotonic()
    results = job.run()
    assert time.monotonic() - started < job.world.timeout_seconds / 2
    problems = [staged.receipt.problem for staged in results]
    assert problems[rank * 2] == f"export failed: InjectedFault: injected fault: export on rank {rank * 2}"
    assert [problem for index, problem in enumerate(problems) if index != rank * 2] == [None, None, None]
    assert all(staged.states == {} and staged.receipt.received_bytes == 0 for staged in results)
    assert len(job.mailbox) == 0


@pytest.mark.parametrize(("layer", "rank"), [(1, 1), (3, 2)])
def test_a_receiver_without_memory_says_so_before_anything_moves_and_nobody_waits(monkeypatch, layer, rank):
    # Rank 0 only sends, rank 1 sends and receives, rank 2 only receives: the two transfers hang together.
    def without_memory(manifest, device):
        if manifest.layer == layer:
            raise torch.OutOfMemoryError("no memory")
        return allocate(manifest, device)

    monkeypatch.setattr(EXECUTE, "allocate", without_memory)
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

    def noted(manifest, device):
        sent_when_allocated.append((manifest.layer, len(job.mailbox)))
        return allocate(manifest, device)

    monkeypatch.setattr(EXECUTE, "allocate", noted)
    _, receiver = job.run()
    assert sent_when_allocated == [(2, 0), (3, 0)]
    assert receiver.receipt.problem is None


@pytest.mark.parametrize(
    ("failing_rank", "told"),
    [
        (1, "layer 3: checking failed: RuntimeError: no device"),
        (0, "layer 3: checking failed: RuntimeError: no device (on rank 0, which sent it)"),
    ],
    ids=["receiver", "sender"],
)
def test_a_check_that_fails_is_a_problem_of_the_receiver_and_nobody_waits(monkeypatch, failing_rank, told):
    def failing(buffers):
        if (rank_here(), layer_of(buffers)) == (failing_rank, 3):
            raise RuntimeError("no device")
        return digest(buffers)

    monkeypatch.setattr(EXECUTE, "digest", failing)
    job = Pipelines(plan_of([4, 4], [2, 6]))
    started = time.monotonic()
    sender, receiver = job.run()
    assert time.monotonic() - started < job.world.timeout_seconds / 2
    assert receiver.receipt.problem == told
    assert (receiver.states, sender.states, sender.receipt.problem) == ({}, {}, None)


def test_a_tensor_that_never_arrives_ends_in_errors_that_name_who_is_waited_for():
    job = Pipelines(plan_of([4, 4], [3, 5]), faults=Faults().plan(Operation.LOSE, 0), timeout_seconds=0.2)
    sender, receiver = job.run()
    assert [type(error) for error in (sender, receiver)] == [CollectiveTimeout, CollectiveTimeout]
    assert "rank 1: receiving 0 from rank 0" in str(receiver)
    assert "rank 0: digests of what was sent: ranks [1] absent" in str(sender)


def test_a_rank_that_is_gone_ends_in_an_error_that_names_what_was_waited_for():
    job = Pipelines(plan_of([4, 4], [3, 5]), timeout_seconds=0.2)
    results = job.world.run(lambda rank: None if rank == 1 else job.execute(rank))
    assert isinstance(results[0], CollectiveTimeout)
    assert "rank 0: plan and manifests: ranks [1] absent" in str(results[0])


@pytest.mark.parametrize("num_met", [1, 2])
def test_a_rank_that_is_gone_while_room_is_made_ends_in_an_error_too(num_met):
    job = Pipelines(plan_of([4, 4], [3, 5]), timeout_seconds=0.2)
    meetings = ["plan and manifests", "shards of the optimizer", "room for what arrives"]

    def run(rank):
        if rank == 0:
            return job.execute(rank)
        # Rank 1 agrees to the plan, tells what it wants to hold, and dies.
        values = [Offer(digest=job.plan.digest, problem=None, pipeline_ranks=(0, 1)), (None, {})]
        collective = ThreadCollective(job.world, 1)
        return [collective.gather(*pair) for pair in zip(values[:num_met], meetings, strict=False)]

    results = job.world.run(run)
    assert isinstance(results[0], CollectiveTimeout)
    assert f"rank 0: {meetings[num_met]}: ranks [1] absent" in str(results[0])
    assert len(job.mailbox) == 0
