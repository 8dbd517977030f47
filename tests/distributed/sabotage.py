"""What can be made to go wrong in a move, and where. The plugin's own functions are wrapped, in this process and for good.

A `Fault` names rank, move and place, so that it strikes at the same point of the job whatever the speed of the ranks.
"""

import importlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial, wraps
from typing import Any


class Place(StrEnum):
    """Where in a move a fault strikes, in the order in which a rank gets there."""

    PLAN = "plan"
    """At its very start: `SPOIL` takes the first layer out of the plan."""
    EXPORT = "export"
    GATHER = "gather"
    """About to take part in the first gather of the move."""
    OUTLINE = "outline"
    ROOM = "room"
    SEND = "send"
    """About to queue a message: `SPOIL` does not send it."""
    TRANSFER = "transfer"
    """About to start the second bucket, when a part of what moves has arrived."""
    ARRIVED = "arrived"
    """All has arrived, nothing is checked: `SPOIL` flips a bit."""
    PREPARE = "prepare"
    VOTE = "vote"
    """About to take part in the vote."""
    COMMIT = "commit"
    """After the vote, when layers have left their stage and others have not entered it."""
    REWRAP = "rewrap"
    STEP = "step"
    """In the first forward pass after the move."""


class Deed(StrEnum):
    """What happens there."""

    DIE = "die"
    """The process is gone (kill -9)."""
    RAISE = "raise"
    """A MemoryError."""
    SLEEP = "sleep"
    """The rank is slow."""
    SPOIL = "spoil"
    """What passes is not what it should be; see the places."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong on one rank."""

    rank: int
    place: Place
    deed: Deed
    move: int = 1
    """Which move of the job, from 1."""
    kind: str = ""
    """Of state, for a flipped bit: as in `migrate.Key.kind` or, of a range of a sharded optimizer, `range <kind>`."""
    seconds: float = 0.0
    """How long a slow rank sleeps."""


@dataclass(frozen=True, kw_only=True)
class Observer:
    """Who wants to hear of what happens here."""

    move_begins: Callable[[], None]
    fault_strikes: Callable[[Fault], None]
    """Before it does: it may be the last that this process hears."""


class Saboteur:
    """Makes the faults of this rank happen, each once."""

    def __init__(self, faults: Sequence[Fault], observer: Observer) -> None:
        self._faults, self._observer = list(faults), observer
        self._move = self._bucket = 0

    def get_ready(self) -> None:
        """Wrap what passes the places. Before training starts."""
        controller = importlib.import_module("megatron_dyn.controller")
        execute = importlib.import_module("megatron_dyn.migrate.execute")
        transport = importlib.import_module("megatron_dyn.migrate.transport").ProcessGroupTransport
        collective = importlib.import_module("megatron_dyn.host.collective").GlooCollective
        store = importlib.import_module("megatron_dyn.host.store").MegatronLayerStore
        schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
        _before(execute, "allocate", partial(self._strike, Place.ROOM))
        _before(collective, "gather", self._meet)
        _before(transport, "run", self._start_bucket)
        for place in (Place.EXPORT, Place.OUTLINE, Place.PREPARE, Place.REWRAP):
            _before(store, place.value, partial(self._strike, place))
        _before(store, "attach", partial(self._strike, Place.COMMIT))
        _before(schedules, "forward_step", partial(self._strike, Place.STEP))
        controller.moves_between = self._plan(controller.moves_between)
        transport.submit_send = self._send(transport.submit_send)
        execute._Move._transfer = self._transfer(execute._Move._transfer)

    def _strike(self, place: Place, *_: Any) -> Fault | None:
        """Do what is due here and return it; what is to be spoilt, the caller spoils."""
        due = [fault for fault in self._faults if (fault.place, fault.move) == (place, self._move)]
        if not due:
            return None
        fault = due[0]
        self._faults.remove(fault)
        self._observer.fault_strikes(fault)
        if fault.deed is Deed.DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.deed is Deed.RAISE:
            raise MemoryError(f"no room ({place.value})")
        elif fault.deed is Deed.SLEEP:
            time.sleep(fault.seconds)
        return fault

    def _meet(self, _: Any, value: Any, what: str) -> None:
        places = {"plan and manifests": Place.GATHER, "vote on the move": Place.VOTE}
        if what in places:
            self._strike(places[what])

    def _start_bucket(self, *_: Any) -> None:
        self._bucket += 1
        if self._bucket == 2:
            self._strike(Place.TRANSFER)

    def _plan(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def moves_between(*layouts: Any) -> Any:
            self._observer.move_begins()
            self._move += 1
            self._bucket = 0
            moves = original(*layouts)
            return moves[1:] if self._strike(Place.PLAN) else moves

        return moves_between

    def _send(self, original: Callable[..., None]) -> Callable[..., None]:
        def submit_send(*args: Any, **kwargs: Any) -> None:
            if not self._strike(Place.SEND):
                original(*args, **kwargs)

        return submit_send

    def _transfer(self, original: Callable[..., None]) -> Callable[..., None]:
        def transfer(move: Any, sent: Any) -> None:
            original(move, sent)
            if fault := self._strike(Place.ARRIVED):
                arrived = [tensor for kind, tensor in _arrived(move) if kind == fault.kind]
                _flip(arrived[len(arrived) // 2])

        return transfer


def _before(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Let `call`, with the same positional arguments, precede `owner.name`."""
    original = getattr(owner, name)

    @wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        call(*args)
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _arrived(move: Any) -> list[tuple[str, Any]]:
    """(kind, tensor) of all that lies aside on this rank."""
    layers = [(key.kind, tensor) for state in move._incoming.values() for key, tensor in state.tensors.items()]
    pieces = [tensors for ranges in move._ranges.values() for _, tensors in ranges]
    return [*layers, *((f"range {kind}", tensor) for tensors in pieces for kind, tensor in tensors.items())]


def _flip(tensor: Any) -> None:
    """Flip the lowest bit of one byte in the middle."""
    data = tensor.detach().view(-1).view(importlib.import_module("torch").uint8)
    data[len(data) // 2] ^= 1
