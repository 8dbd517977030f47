"""The patch ledger: each place where the plugin reaches into its host is a row of data; `apply` puts rows in force.

Rows live beside the code that needs them (`host/rows.py`, `host/cpu/`, the hooks); this module alone changes attributes
of other modules, checks that a target still looks as expected, and takes every change back. It must not know what any
row is for.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from megatron_dyn.host.compat import HostError, describe_host, missing_from_host, missing_parameters, resolve

MARK = "__megatron_dyn_seam__"
"""Attribute of a replacement that holds its `Seam`."""

_ABSENT = object()


class SeamError(HostError):
    """A seam cannot be applied or undone; the message names its target and the installed and supported Megatron."""


@dataclass(frozen=True, kw_only=True)
class Seam:
    """One row of the ledger: an attribute of the host and what takes its place."""

    target: str
    """The attribute, as `package.module:attribute.path`: the name its *users* look up, not where it was defined."""
    why: str
    """What does not work without this row."""
    remove_when: str
    """The change in the host (or in torch) that makes this row superfluous."""
    parameters: tuple[str, ...] = ()
    """Names that the signature of the target must contain; empty means that it is not checked."""
    wrap: Callable[[Any], Any]
    """Makes the replacement out of the original: a new object each time, since it gets marked; must not call it."""


class Undo:
    """Handle that takes back what was put in force, newest first: call it, or use it as a context manager.

    Calling it a second time does nothing. Whoever applied the seams calls it, on every rank that did.
    """

    def __init__(self, stack: ExitStack) -> None:
        """Own `stack`; its callbacks run when the handle is called."""
        self._stack = stack

    def __call__(self) -> None:
        """Take everything back.

        Raises `SeamError`, after the rest was taken back, where someone else has replaced a target since.
        """
        self._stack.close()

    def __enter__(self) -> Self:
        """Return the handle itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take everything back, whether or not the block failed."""
        self()


def apply(seams: Iterable[Seam]) -> Undo:
    """Put the seams in force in their order and return the handle that takes them back.

    A seam that is in force already is left alone, and so is not in what the handle takes back. Different seams may
    share a target: the later one then wraps the earlier. Raises `SeamError`, with nothing of this call left in force,
    where a target does not exist or where its signature lacks a parameter the seam relies on; it names every such
    target. Not thread-safe: call it from the main thread.
    """
    waiting = deque(seams)
    with ExitStack() as stack:
        while waiting:
            seam = waiting.popleft()
            try:
                _apply_one(seam, stack)
            except SeamError as error:
                # While the earlier rows are in force: without them a later target may not even import (host/cpu).
                others = missing_from_host(waiting)
                raise SeamError(f"{error}; missing as well: {', '.join(others)}" if others else str(error)) from error
        return Undo(stack.pop_all())


def is_applied(seam: Seam) -> bool:
    """Return whether this very seam is in force, also below seams that were applied to the same target later."""
    owner, name = _resolve(seam)
    current = getattr(owner, name)
    while True:
        if _mark_of(current) is seam:
            return True
        if not hasattr(current, "__wrapped__"):
            return False
        current = current.__wrapped__


def _apply_one(seam: Seam, stack: ExitStack) -> None:
    if is_applied(seam):
        return
    owner, name = _resolve(seam)
    original = getattr(owner, name)
    _check_signature(seam, original)
    replacement = seam.wrap(original)
    setattr(replacement, MARK, seam)
    replacement.__wrapped__ = original
    # What stood in the owner itself: a class may inherit the attribute, or hold it behind a staticmethod.
    stored = vars(owner).get(name, _ABSENT)
    setattr(owner, name, staticmethod(replacement) if isinstance(stored, staticmethod | classmethod) else replacement)
    stack.callback(_restore, seam, owner, name, stored)


def _restore(seam: Seam, owner: Any, name: str, stored: Any) -> None:
    if _mark_of(getattr(owner, name, None)) is not seam:
        raise SeamError(f"seam {seam.target!r} cannot be undone: its target was replaced again since; undo that first")
    if stored is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, stored)


def _mark_of(value: Any) -> Seam | None:
    # Only the object's own attribute counts: a class would hand its mark on to its subclasses.
    mark = getattr(value, "__dict__", {}).get(MARK)
    return mark if isinstance(mark, Seam) else None


def _resolve(seam: Seam) -> tuple[Any, str]:
    try:
        return resolve(seam.target)
    except HostError as error:
        raise SeamError(f"seam {error}") from error


def _check_signature(seam: Seam, original: Any) -> None:
    if not seam.parameters:
        return
    try:
        actual = tuple(inspect.signature(original).parameters)
    except (TypeError, ValueError) as error:
        raise SeamError(f"seam target {seam.target!r} has no signature to check ({error}); {describe_host()}") from error
    if missing := missing_parameters(original, seam.parameters):
        raise SeamError(
            f"seam target {seam.target!r}: expected parameters {', '.join(seam.parameters)}, "
            f"missing {', '.join(missing)}, actual {', '.join(actual)}; {describe_host()}"
        )
