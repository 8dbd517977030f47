"""Ranks as threads of one process: where they meet, and the memory that their transports share.

Implements the control plane (`ports.Collective`) and the `Mailbox` under `migrate.MemoryTransport`. Stricter than the
real ones: values are pickled as between processes, ranks that meet for different reasons fail, and every wait ends.
Must not know Megatron.
"""

import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch

from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.testing.faults import Faults, Operation


class ThreadWorld:
    """The ranks of a job as threads of this process, and the place where they meet."""

    def __init__(self, size: int, *, timeout_seconds: float = 20.0) -> None:
        """`timeout_seconds` bounds every wait: meetings, transfers, and the run as a whole."""
        self.size, self.timeout_seconds = size, timeout_seconds
        self._changed = threading.Condition()
        self._meetings: list[dict[int, tuple[str, bytes]]] = []
        self._num_met = [0] * size

    @property
    def num_meetings(self) -> int:
        """How often ranks have met; a meeting that only some reached counts too."""
        return len(self._meetings)

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Call `body(rank)` on every rank at once; returns by rank what each returned or the Exception that it raised.

        Raises AssertionError naming the ranks that have not ended in time.
        """
        results: list[Any] = [None] * self.size

        def one(rank: int) -> None:
            try:
                results[rank] = body(rank)
            except Exception as error:  # noqa: BLE001 - the test decides what to make of it
                results[rank] = error

        threads = [threading.Thread(target=one, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self.timeout_seconds)
        if late := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
            raise AssertionError(f"ranks {late} still run after {2 * self.timeout_seconds:g} s")
        return results

    def meet(self, rank: int, value: object, what: str) -> list[Any]:
        """Every rank's value, by rank; see ports.Collective.gather."""
        with self._changed:
            index = self._num_met[rank]
            self._num_met[rank] += 1
            while len(self._meetings) <= index:
                self._meetings.append({})
            meeting = self._meetings[index]
            meeting[rank] = (what, pickle.dumps(value))
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: len(meeting) == self.size, self.timeout_seconds):
                absent = sorted(set(range(self.size)) - set(meeting))
                raise CollectiveTimeout(f"rank {rank}: {what}: ranks {absent} absent for {self.timeout_seconds:g} s")
        if len(reasons := {reason for reason, _ in meeting.values()}) != 1:
            raise AssertionError(f"ranks meet for different reasons: {sorted(reasons)}")
        return [pickle.loads(meeting[other][1]) for other in range(self.size)]


class ThreadCollective:
    """Implements ports.Collective for one rank of a ThreadWorld."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        """One per rank."""
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        """See ports.Collective."""
        return self._rank

    @property
    def size(self) -> int:
        """See ports.Collective."""
        return self._world.size

    def gather(self, value: object, what: str) -> list[Any]:
        """See ports.Collective."""
        return self._world.meet(self._rank, value, what)


class ThreadMailbox:
    """Implements migrate.transport.Mailbox: the memory that the MemoryTransports of all ranks share."""

    def __init__(self, *, timeout_seconds: float = 20.0, faults: Faults | None = None) -> None:
        """One per job; `faults` may corrupt or lose what is put in."""
        self._timeout_seconds = timeout_seconds
        self._faults = faults or Faults()
        self._changed = threading.Condition()
        self._buffers: dict[tuple[int, int, int], torch.Tensor] = {}

    def __len__(self) -> int:
        """Buffers that nobody has taken yet."""
        return len(self._buffers)

    def put(self, source: int, destination: int, tag: int, buffer: torch.Tensor) -> None:
        """See Mailbox; never waits."""
        copy = buffer.clone()
        if self._faults.strikes(Operation.LOSE, source):
            return
        if self._faults.strikes(Operation.CORRUPT, source):
            copy[copy.numel() // 2] ^= 1
        with self._changed:
            self._buffers[source, destination, tag] = copy
            self._changed.notify_all()

    def take(self, source: int, destination: int, tag: int) -> torch.Tensor:
        """See Mailbox; raises CollectiveTimeout naming the sender."""
        key = (source, destination, tag)
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._buffers, self._timeout_seconds):
                raise CollectiveTimeout(
                    f"rank {destination}: receiving {tag} from rank {source}: nothing in {self._timeout_seconds:g} s"
                )
            return self._buffers.pop(key)
