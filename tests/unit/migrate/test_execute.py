"""Execute: layers arrive whole, each from its own pipeline, as they are and without a copy."""

from dataclasses import replace
from importlib import import_module

import pytest
import torch

from megatron_dyn.migrate import Key, describe, digest
from megatron_dyn.testing.fakes import small_layer
from tests.unit.migrate.pipelines import NUM_TENSORS, Pipelines, assert_same, layer_of, plan_of, rank_here, tag_of

# The module: its name in the package is the function's.
EXECUTE = import_module("megatron_dyn.migrate.execute")
MOVES = [([4, 4], [2, 6]), ([2, 6], [7, 1]), ([2, 2, 2, 2], [1, 2, 3, 2]), ([3, 1, 1, 3], [0, 4, 4, 0])]
# Two layers go up and one comes down; rank 1 sends and receives.
BOTH_WAYS = ([4, 4, 4], [2, 7, 3])


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
        assert job.stores[pp_rank].calls == [("quiesce", None)]
    assert len(job.mailbox) == 0


def test_what_is_sent_is_received_and_counted_in_bytes():
    receipts = [staged.receipt for staged in Pipelines(plan_of([4, 4], [2, 6])).run()]
    assert receipts[0].sent_bytes == receipts[1].received_bytes > 0
    assert receipts[1].sent_bytes == receipts[0].received_bytes == 0

    assert receipts[0].sent_bytes == sum(describe(small_layer(layer)).num_bytes for layer in (2, 3))


def test_every_tensor_is_its_own_message_and_both_ends_queue_them_in_the_same_order():
    plan = plan_of(*BOTH_WAYS)
    job = Pipelines(plan)
    job.run()
    queued = [[event for event in events if event[0] in ("send", "receive")] for events in job.events]
    upward = [("send", 1, tag_of(plan, layer, index)) for layer in (2, 3) for index in range(NUM_TENSORS)]
    downward = [("send", 1, tag_of(plan, 8, index)) for index in range(NUM_TENSORS)]
    assert queued[0] == upward
    assert queued[2] == downward
    assert queued[1] == [("receive", 0, tag) for _, _, tag in upward] + [("receive", 2, tag) for _, _, tag in downward]


def test_a_tensor_without_elements_sends_nothing_and_arrives():
    job = Pipelines(plan_of([4, 4], [3, 5]))
    empty = Key("buffer", "empty")
    tensors = {empty: torch.zeros(2, 0, dtype=torch.bfloat16), **small_layer(3).tensors}
    job.stores[0].layers[3] = replace(small_layer(3), tensors=tensors)
    _, receiver = job.run()
    assert receiver.receipt.problem is None
    assert (receiver.states[3].tensors[empty].shape, receiver.states[3].tensors[empty].dtype) == ((2, 0), torch.bfloat16)
    assert_same(receiver.states[3], job.stores[0].layers[3])
    assert sorted(job.wires[0].sent) == list(range(NUM_TENSORS))


def test_nothing_is_copied_on_either_side():
    job = Pipelines(plan_of([4, 4], [2, 6]))
    _, receiver = job.run()
    for layer in (2, 3):
        leaving, arrived = job.stores[0].layers[layer].tensors.values(), receiver.states[layer].tensors.values()
        for index, (live, staged) in enumerate(zip(leaving, arrived, strict=True)):
            assert job.wires[0].sent[tag_of(job.plan, layer, index)].data_ptr() == live.data_ptr()
            assert job.wires[1].received[tag_of(job.plan, layer, index)].data_ptr() == staged.data_ptr()
            assert live.data_ptr() != staged.data_ptr()


def test_a_tensor_that_is_not_contiguous_arrives_equal():
    job = Pipelines(plan_of([4, 4], [3, 5]))
    tensor = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    job.stores[0].layers[3] = replace(small_layer(3), tensors={Key("parameter", "weight"): tensor})
    _, receiver = job.run()
    assert receiver.receipt.problem is None
    assert_same(receiver.states[3], job.stores[0].layers[3])


def test_all_ranks_meet_four_times_and_the_digests_of_what_leaves_are_made_under_way(monkeypatch):
    job = Pipelines(plan_of(*BOTH_WAYS))

    def noted(buffers):
        job.events[rank_here()].append(("digest", layer_of(buffers)))
        return digest(buffers)

    monkeypatch.setattr(EXECUTE, "digest", noted)
    job.run()
    steps = [[event for event in events if event[0] not in ("send", "receive")] for events in job.events]
    digests = [{"leaving": (2, 3), "arriving": ()}, {"leaving": (), "arriving": (2, 3, 8)}, {"leaving": (8,), "arriving": ()}]
    for passed, layers in zip(steps, digests, strict=True):
        assert passed == [
            "plan and manifests",
            "shards of the optimizer",
            "room for what arrives",
            "run",
            "meanwhile",
            *(("digest", layer) for layer in layers["leaving"]),
            "taking",
            "digests of what was sent",
            *(("digest", layer) for layer in layers["arriving"]),
        ]
    assert job.world.num_meetings == 4


def test_each_replica_gets_its_layers_from_its_own_pipeline():
    job = Pipelines(plan_of([2, 2], [1, 3]), num_replicas=2)
    for replica, store in enumerate(job.stores[:2]):
        store.layers[1] = replace(small_layer(1), scalars={"replica": replica})
    results = job.run()
    assert [staged.states[1].scalars for staged in results[2:]] == [{"replica": 0}, {"replica": 1}]


@pytest.mark.parametrize("bucket_bytes", [1, 5, 12, 36, 1000])
def test_however_little_is_under_way_at_a_time_the_same_arrives(bucket_bytes):
    plan = plan_of(*BOTH_WAYS)
    whole, parts = Pipelines(plan).run(), Pipelines(plan, bucket_bytes=bucket_bytes)
    for staged, expected in zip(parts.run(), whole, strict=True):
        assert list(staged.states) == list(expected.states)
        for layer, state in staged.states.items():
            assert_same(state, expected.states[layer])
        assert replace(staged.receipt, seconds=0.0) == replace(expected.receipt, seconds=0.0)
    for wire, events in zip(parts.wires, parts.events, strict=True):
        # What is queued between two runs is one bucket; rank 1 both sends and receives.
        sizes, buffers = [0], wire.sent | wire.received
        for event in events:
            if event == "run":
                sizes.append(0)
            elif event[0] in ("send", "receive"):
                sizes[-1] += buffers[event[2]].numel()
        assert sizes.pop() == 0
        assert max(sizes) <= bucket_bytes
    assert len(parts.mailbox) == 0


def test_digests_of_what_leaves_are_made_once_however_many_buckets_there_are(monkeypatch):
    job, digested = Pipelines(plan_of([4, 4], [2, 6]), bucket_bytes=7), []

    def noted(buffers):
        digested.append((rank_here(), layer_of(buffers)))
        return digest(buffers)

    monkeypatch.setattr(EXECUTE, "digest", noted)
    job.run()
    assert job.events[0].count("run") > 1
    assert sorted(digested) == [(0, 2), (0, 3), (1, 2), (1, 3)]


def test_a_layer_without_a_byte_moves_too():
    job = Pipelines(plan_of([4, 4], [3, 5]))
    job.stores[0].layers[3] = replace(small_layer(3), tensors={Key("buffer", "empty"): torch.zeros(2, 0)})
    sender, receiver = job.run()
    assert (sender.receipt.sent_layers, receiver.receipt.received_layers) == ((3,), (3,))
    assert (receiver.receipt.problem, receiver.receipt.received_bytes) == (None, 0)
    assert_same(receiver.states[3], job.stores[0].layers[3])
