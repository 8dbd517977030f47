"""Data planes: how buffers get from rank to rank. Three verbs (submit_send, submit_receive, run); no policy, no layout."""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_dyn.ports import CollectiveTimeout


class Mailbox(Protocol):
    """What an in-memory transport needs of its ranks' shared memory."""

    def put(self, source: int, destination: int, tag: int, buffer: torch.Tensor) -> None:
        """Store a copy of one buffer."""

    def take(self, source: int, destination: int, tag: int) -> torch.Tensor:
        """Wait for a buffer and take it."""


class ProcessGroupTransport:
    """Point-to-point over a torch process group (gloo or NCCL) whose ranks are the global ranks of the job."""

    def __init__(self, group: dist.ProcessGroup | None, *, timeout_seconds: float) -> None:
        """`group` None is the default group. Every wait is bounded by `timeout_seconds`."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        self._queue: list[tuple[dist.P2POp, str]] = []

    def submit_send(self, buffer: torch.Tensor, *, to_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._queue.append((dist.P2POp(dist.isend, buffer, to_rank, self._group, tag), f"sending to rank {to_rank}"))

    def submit_receive(self, buffer: torch.Tensor, *, from_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._queue.append((dist.P2POp(dist.irecv, buffer, from_rank, self._group, tag), f"receiving from rank {from_rank}"))

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """See ports.Transport. Raises CollectiveTimeout naming the peer of the first transfer that did not finish."""
        queue, self._queue = self._queue, []
        if not queue:
            meanwhile()
            return
        what = "starting the transfer"
        try:
            # On NCCL the first call on a group must be a collective; Megatron reduces start-up times on the default one.
            works = dist.batch_isend_irecv([operation for operation, _ in queue])
            meanwhile()
            for index, work in enumerate(works):
                what = queue[index][1] if len(works) == len(queue) else "moving layers"
                work.wait(self._timeout)
        except RuntimeError as error:
            raise CollectiveTimeout(
                f"rank {dist.get_rank()}: {what} failed within {self._timeout.total_seconds():g} s: {error}"
            ) from error
        if any(operation.tensor.is_cuda for operation, _ in queue):
            # NCCL's wait only orders streams; the checksum that follows must see finished data, and a hang must show here.
            torch.cuda.synchronize()


@dataclass(slots=True)
class MemoryTransport:
    """Ranks as threads of one process, for tests of everything above the wire."""

    rank: int
    mailbox: Mailbox
    _sends: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)
    _receives: list[tuple[int, int, torch.Tensor]] = field(default_factory=list)

    def submit_send(self, buffer: torch.Tensor, *, to_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._sends.append((to_rank, tag, buffer))

    def submit_receive(self, buffer: torch.Tensor, *, from_rank: int, tag: int) -> None:
        """See ports.Transport."""
        self._receives.append((from_rank, tag, buffer))

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """See ports.Transport."""
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        for to_rank, tag, buffer in sends:
            self.mailbox.put(self.rank, to_rank, tag, buffer)
        meanwhile()
        for from_rank, tag, buffer in receives:
            buffer.copy_(self.mailbox.take(from_rank, self.rank, tag))
