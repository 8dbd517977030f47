"""A plan of what is to go wrong, where: the fakes of all ranks ask it before they do what can fail.

It knows names of operations and ranks only, so that any fake can use it.
"""

import threading
from enum import StrEnum
from typing import Self


class Operation(StrEnum):
    """What `Faults` can make fail."""

    EXPORT = "export"
    PREPARE = "prepare"
    DETACH = "detach"
    ATTACH = "attach"
    PUBLISH = "publish"
    REWRAP = "rewrap"
    CORRUPT = "corrupt"
    """A byte flips in the next buffer that the rank sends."""
    LOSE = "lose"
    """The next buffer that the rank sends never arrives."""


class InjectedFault(RuntimeError):
    """An operation that was made to fail; the message names it and the rank."""


class Faults:
    """What is to go wrong, shared by the fakes of all ranks: each planned fault strikes once. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._planned: list[tuple[Operation, int]] = []
        self.struck: list[tuple[Operation, int]] = []
        """(operation, rank) of every fault that has happened, oldest first."""

    def plan(self, operation: Operation, rank: int) -> Self:
        """Make the next `operation` on `rank` fail; returns itself, for chaining."""
        with self._lock:
            self._planned.append((operation, rank))
        return self

    def strikes(self, operation: Operation, rank: int) -> bool:
        """Whether a fault is due here and now; using it up."""
        with self._lock:
            if (operation, rank) not in self._planned:
                return False
            self._planned.remove((operation, rank))
            self.struck.append((operation, rank))
            return True

    def check(self, operation: Operation, rank: int) -> None:
        """Raise InjectedFault where a fault is due."""
        if self.strikes(operation, rank):
            raise InjectedFault(f"injected fault: {operation.value} on rank {rank}")
