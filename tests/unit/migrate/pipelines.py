"""Pipelines without a model for the tests of `execute`: threads as ranks, which tell what they ask of their ports."""

import threading

import torch

from megatron_dyn.migrate import DEFAULT_BUCKET_BYTES, MemoryTransport, Seat, execute
from megatron_dyn.plan import moves_between
from megatron_dyn.records import Layout, Plan
from megatron_dyn.testing.fakes import MemoryStore, small_layer
from megatron_dyn.testing.faults import Faults
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox, ThreadWorld

NUM_TENSORS = len(small_layer(0).tensors)


def tag_of(plan, layer, index):
    """The tag of tensor `index` of a layer that moves, in one pipeline and one bucket: senders by rank, layers as planned."""
    senders = sorted(plan.moves, key=lambda move: move.source)
    return [move.layer for move in senders].index(layer) * NUM_TENSORS + index


def layer_of(buffers):
    """Which small_layer these buffers are."""
    return int(buffers[0].view(torch.bfloat16)[0]) // 100


def rank_here():
    """The rank whose thread this is (testing.threads)."""
    return int(threading.current_thread().name.removeprefix("rank "))


def plan_of(before, after):
    old, new = Layout.contiguous(before), Layout.contiguous(after)
    return Plan(before=old, after=new, moves=moves_between(old, new), reason="test")


class Wire(MemoryTransport):
    """Also tells what is asked of it, in order, and keeps the buffers themselves."""

    def __init__(self, rank, mailbox, events):
        super().__init__(rank, mailbox)
        self.events, self.sent, self.received = events, {}, {}

    def submit_send(self, buffer, *, to_rank, tag):
        self.events.append(("send", to_rank, tag))
        self.sent[tag] = buffer
        super().submit_send(buffer, to_rank=to_rank, tag=tag)

    def submit_receive(self, buffer, *, from_rank, tag):
        self.events.append(("receive", from_rank, tag))
        self.received[tag] = buffer
        super().submit_receive(buffer, from_rank=from_rank, tag=tag)

    def run(self, meanwhile=lambda: None):
        def noted():
            self.events.append("meanwhile")
            meanwhile()
            self.events.append("taking")

        self.events.append("run")
        super().run(noted)


class Meetings(ThreadCollective):
    """Also tells what the ranks meet for."""

    def __init__(self, world, rank, events):
        super().__init__(world, rank)
        self.events = events

    def gather(self, value, what):
        self.events.append(what)
        return super().gather(value, what)


class Pipelines:
    """`num_replicas` pipelines as threads. Ranks run replica fastest, as in Megatron."""

    def __init__(self, plan, *, num_replicas=1, faults=None, timeout_seconds=20.0, bucket_bytes=DEFAULT_BUCKET_BYTES):
        self.plan, self.num_replicas, self.bucket_bytes = plan, num_replicas, bucket_bytes
        self.world = ThreadWorld(plan.before.num_stages * num_replicas, timeout_seconds=timeout_seconds)
        faults = faults or Faults()
        self.mailbox = ThreadMailbox(timeout_seconds=timeout_seconds, faults=faults)
        self.stores = [
            MemoryStore(rank, plan.before.layers_of_stage(rank // num_replicas), faults=faults)
            for rank in range(self.world.size)
        ]
        self.events = [[] for _ in self.stores]
        self.wires = [Wire(rank, self.mailbox, events) for rank, events in enumerate(self.events)]

    def seat(self, rank):
        pp_rank, replica = divmod(rank, self.num_replicas)
        ranks = tuple(range(replica, self.world.size, self.num_replicas))
        return Seat(global_rank=rank, pp_rank=pp_rank, pipeline_ranks=ranks, device=torch.device("cpu"))

    def execute(self, rank, plan=None):
        return execute(
            plan or self.plan,
            self.seat(rank),
            self.stores[rank],
            collective=Meetings(self.world, rank, self.events[rank]),
            transport=self.wires[rank],
            bucket_bytes=self.bucket_bytes,
        )

    def run(self):
        return self.world.run(self.execute)


def assert_same(actual, expected):
    assert (actual.layer, actual.scalars) == (expected.layer, expected.scalars)
    assert list(actual.tensors) == list(expected.tensors)
    for key, tensor in expected.tensors.items():
        assert torch.equal(actual.tensors[key], tensor), key
