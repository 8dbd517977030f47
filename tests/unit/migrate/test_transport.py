"""Transports: nothing moves before `run`, what was queued is forgotten after it, and no wait is endless."""

import multiprocessing

import pytest
import torch
import torch.distributed as dist

from megatron_dyn.migrate import MemoryTransport, ProcessGroupTransport
from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.testing.threads import ThreadMailbox

JOIN_SECONDS = 60


def buffer(*values):
    return torch.tensor(values, dtype=torch.uint8)


class TestMemoryTransport:
    def pair(self):
        mailbox = ThreadMailbox(timeout_seconds=0.2)
        return mailbox, MemoryTransport(0, mailbox), MemoryTransport(1, mailbox)

    def test_buffers_find_their_place_by_peer_and_tag(self):
        _, first, second = self.pair()
        first.submit_send(buffer(1, 2), to_rank=1, tag=5)
        first.submit_send(buffer(3, 4), to_rank=1, tag=6)
        second.submit_send(buffer(9), to_rank=0, tag=5)
        six, five, other = buffer(0, 0), buffer(0, 0), buffer(0)
        second.submit_receive(six, from_rank=0, tag=6)
        second.submit_receive(five, from_rank=0, tag=5)
        first.run()
        second.run()
        first.submit_receive(other, from_rank=1, tag=5)
        first.run()
        assert (five.tolist(), six.tolist(), other.tolist()) == ([1, 2], [3, 4], [9])

    def test_nothing_moves_before_run_and_what_was_queued_is_forgotten_after_it(self):
        mailbox, first, second = self.pair()
        first.submit_send(buffer(1), to_rank=1, tag=0)
        assert len(mailbox) == 0
        first.run()
        assert len(mailbox) == 1
        second.submit_receive(buffer(0), from_rank=0, tag=0)
        second.run()
        first.run()
        second.run()
        assert len(mailbox) == 0

    def test_a_sender_may_reuse_its_buffer_after_run(self):
        _, first, second = self.pair()
        sent, received = buffer(7), buffer(0)
        first.submit_send(sent, to_rank=1, tag=0)
        first.run()
        sent.zero_()
        second.submit_receive(received, from_rank=0, tag=0)
        second.run()
        assert received.tolist() == [7]

    def test_what_is_done_meanwhile_comes_between_sending_and_receiving(self):
        _, first, second = self.pair()
        asked, answer, calls = buffer(0), buffer(0), []
        first.submit_send(buffer(5), to_rank=1, tag=0)
        first.submit_receive(answer, from_rank=1, tag=1)

        def meanwhile():
            # Works only if the question was sent before this, and the answer is waited for after it.
            second.submit_receive(asked, from_rank=0, tag=0)
            second.submit_send(buffer(6), to_rank=0, tag=1)
            second.run()
            calls.append((asked.item(), answer.item()))

        first.run(meanwhile=meanwhile)
        assert (calls, answer.item()) == ([(5, 0)], 6)

    def test_what_is_to_be_done_meanwhile_is_done_without_a_transfer_too(self):
        calls = []
        self.pair()[1].run(meanwhile=lambda: calls.append("called"))
        assert calls == ["called"]

    def test_a_buffer_that_never_comes_names_both_ranks(self):
        _, _, second = self.pair()
        second.submit_receive(buffer(0), from_rank=0, tag=3)
        with pytest.raises(CollectiveTimeout, match="rank 1: receiving 3 from rank 0"):
            second.run()


class FakeWork:
    """Stands for the handle of one transfer; `error` is what waiting for it ends in."""

    def __init__(self, error=None):
        self.error = error

    def wait(self, timeout):
        if self.error is not None:
            raise self.error


class TestProcessGroupTransportAlone:
    @pytest.fixture
    def started(self, monkeypatch):
        """The batches that were started; each transfer but the first fails."""
        batches = []

        def start(operations):
            batches.append(operations)
            return [FakeWork(RuntimeError("peer closed") if index else None) for index, _ in enumerate(operations)]

        monkeypatch.setattr(dist, "batch_isend_irecv", start)
        monkeypatch.setattr(dist, "get_rank", lambda group=None: 4)
        monkeypatch.setattr(dist, "P2POp", lambda op, tensor, peer, group, tag: transport_operation(tensor, peer, tag))
        return batches

    def test_nothing_queued_starts_nothing(self, started):
        ProcessGroupTransport(None, timeout_seconds=1).run()
        assert started == []

    def test_what_is_to_be_done_meanwhile_is_done_without_a_transfer_too(self, started):
        calls = []
        ProcessGroupTransport(None, timeout_seconds=1).run(meanwhile=lambda: calls.append("called"))
        assert (calls, started) == (["called"], [])

    def test_what_is_done_meanwhile_comes_after_the_start_and_before_any_wait(self, started, monkeypatch):
        events = []
        monkeypatch.setattr(FakeWork, "wait", lambda work, timeout: events.append("wait"))
        wire = ProcessGroupTransport(None, timeout_seconds=1)
        wire.submit_send(buffer(1), to_rank=3, tag=8)
        wire.submit_receive(buffer(0), from_rank=6, tag=9)
        wire.run(meanwhile=lambda: events.append(f"{len(started)} started"))
        assert events == ["1 started", "wait", "wait"]

    def test_the_error_names_the_transfer_that_failed_and_the_queue_is_empty_after_it(self, started):
        wire = ProcessGroupTransport(None, timeout_seconds=2.5)
        wire.submit_send(buffer(1), to_rank=3, tag=8)
        wire.submit_receive(buffer(0), from_rank=6, tag=9)
        with pytest.raises(CollectiveTimeout, match=r"rank 4: receiving from rank 6 failed within 2\.5 s: peer closed"):
            wire.run()
        assert [[operation.peer for operation in batch] for batch in started] == [[3, 6]]
        wire.run()
        assert len(started) == 1


def transport_operation(tensor, peer, tag):
    operation = type("Operation", (), {})()
    operation.tensor, operation.peer, operation.tag = tensor, peer, tag
    return operation


def exchange(rank, path, results):
    """One of two ranks over gloo: sends two buffers, receives two, sends an empty one; then waits in vain."""
    store = dist.FileStore(path, 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    wire = ProcessGroupTransport(None, timeout_seconds=30)
    received = [torch.zeros(4, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8), torch.zeros(0, dtype=torch.uint8)]
    sent = [buffer(*[10 * rank + 1] * 4), buffer(*[10 * rank + 2] * 2), torch.zeros(0, dtype=torch.uint8)]
    for tag in range(3):
        wire.submit_send(sent[tag], to_rank=1 - rank, tag=tag)
        wire.submit_receive(received[tag], from_rank=1 - rank, tag=tag)
    calls = []
    wire.run(meanwhile=lambda: calls.append([tensor.tolist() for tensor in sent]))
    outcome = "no error" if len(calls) == 1 else f"meanwhile called {len(calls)} times"
    if rank == 0:
        late = ProcessGroupTransport(None, timeout_seconds=0.5)
        late.submit_receive(torch.zeros(4, dtype=torch.uint8), from_rank=1, tag=77)
        try:
            late.run()
        except CollectiveTimeout as error:
            outcome = str(error)
    results.send(([tensor.tolist() for tensor in received], outcome))
    results.recv()


class TestProcessGroupTransportOverGloo:
    def test_two_ranks_exchange_buffers_and_a_wait_in_vain_ends(self, tmp_path):
        # Forked, so that the ranks do not import torch again; they compute on one thread, so that no pool is inherited.
        context = multiprocessing.get_context("fork")
        pipes = [context.Pipe() for _ in range(2)]
        ranks = [
            context.Process(target=exchange, args=(rank, str(tmp_path / "store"), pipes[rank][1]), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            outcomes = [here.recv() for here, _ in pipes if here.poll(JOIN_SECONDS)]
            for here, _ in pipes:
                here.send("done")
        finally:
            for process in ranks:
                process.join(JOIN_SECONDS)
                process.kill()
        assert [received for received, _ in outcomes] == [[[11] * 4, [12] * 2, []], [[1] * 4, [2] * 2, []]]
        assert "rank 0: receiving from rank 1 failed within 0.5 s" in outcomes[0][1]
        assert outcomes[1][1] == "no error"
