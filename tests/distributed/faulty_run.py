"""Entries that break something on purpose on one rank, for the fault tests. Everything else is the real thing."""

import importlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from tests.distributed.plugin_run import train, train_and_dump

BROKEN_RANK = 1


def corrupt_first_transfer(argv: Sequence[str]) -> dict[str, Any]:
    """One bit of what the broken rank receives in its first move is wrong."""
    transport = importlib.import_module("megatron_dyn.migrate.transport").ProcessGroupTransport

    def corrupting(original: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, meanwhile: Callable[[], None]) -> None:
            received = [operation.tensor for operation, what in self._queue if what.startswith("receiving")]
            original(self, meanwhile)
            if received:
                received[0][len(received[0]) // 2] ^= 1
                transport.run = original

        return run

    if _is_broken_rank():
        transport.run = corrupting(transport.run)
    return train_and_dump(argv)


def refuse_first_move(argv: Sequence[str]) -> dict[str, Any]:
    """The broken rank cannot prepare its first arriving layer (out of memory, say) and so votes no."""
    store = importlib.import_module("megatron_dyn.host.store").MegatronLayerStore

    def refusing(original: Callable[..., None]) -> Callable[..., None]:
        def prepare(self: Any, staged: Any) -> None:
            store.prepare = original
            raise MemoryError("no room for layer 2")

        return prepare

    if _is_broken_rank():
        store.prepare = refusing(store.prepare)
    return train_and_dump(argv)


def die_while_moving(argv: Sequence[str]) -> None:
    """The broken rank's process is gone in the middle of its first move."""
    _replace_run_on_broken_rank(lambda self, meanwhile: os._exit(9))
    train(argv)


def hang_while_moving(argv: Sequence[str]) -> None:
    """The broken rank is alive but never sends; it ends itself long after the others' timeout of 3 s."""

    def hang(self: Any, meanwhile: Callable[[], None]) -> None:
        time.sleep(10)
        os._exit(0)

    _replace_run_on_broken_rank(hang)
    train(argv)


def plan_differently(argv: Sequence[str]) -> None:
    """The broken rank's plan is not the others'."""
    controller = importlib.import_module("megatron_dyn.controller")
    original = controller.moves_between
    if _is_broken_rank():
        controller.moves_between = lambda before, after: original(before, after)[1:]
    train(argv)


def fail_to_commit(argv: Sequence[str]) -> None:
    """The broken rank fails after the vote, when the others have committed."""
    store = importlib.import_module("megatron_dyn.host.store").MegatronLayerStore

    def rewrap(self: Any) -> None:
        raise MemoryError("no room for the gradient buffer")

    if _is_broken_rank():
        store.rewrap = rewrap
    train(argv)


def _replace_run_on_broken_rank(run: Callable[..., None]) -> None:
    if _is_broken_rank():
        importlib.import_module("megatron_dyn.migrate.transport").ProcessGroupTransport.run = run


def _is_broken_rank() -> bool:
    return int(os.environ["RANK"]) == BROKEN_RANK
