"""What a stage needs from the outside world, as Protocols. The host supplies them; tests supply fakes.

Nothing here may import torch: a buffer is opaque to everything but `migrate` and `host`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from megatron_dyn.records import Layout, Plan, RoundReport


class JobError(RuntimeError):
    """The job cannot go on: it must end, with this one line, before it trains on wrongly or waits for ever."""


class CollectiveTimeout(JobError):
    """A wait ran out. The message names what was waited for, for how long, and on which rank."""


@runtime_checkable
class Clock(Protocol):
    """Marks points in time cheaply now and tells the seconds between them later.

    On the CPU a mark is a number; on a GPU it is an event in the stream, readable only after `settle`.
    """

    def mark(self) -> Any:
        """A point in time; must not synchronise."""

    def settle(self) -> None:
        """Make all marks so far readable; may wait for the device."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from one settled mark to another."""


@runtime_checkable
class Collective(Protocol):
    """The control plane: small Python objects, all ranks, a timeout on every wait."""

    @property
    def rank(self) -> int:
        """This process's global rank."""

    @property
    def size(self) -> int:
        """Number of ranks that take part."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by global rank. All ranks must call. Raises CollectiveTimeout naming `what`."""


@runtime_checkable
class Transport(Protocol):
    """The data plane: three verbs. Buffers are flat byte buffers on the device of the model."""

    def submit_send(self, buffer: Any, *, to_rank: int, tag: int) -> None:
        """Queue one buffer for global rank `to_rank`; nothing moves before `run`."""

    def submit_receive(self, buffer: Any, *, from_rank: int, tag: int) -> None:
        """Queue filling `buffer` from global rank `from_rank`."""

    def run(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Do all that was queued, in the order queued, and forget it; `meanwhile` is called while it is under way.

        Raises CollectiveTimeout when a transfer does not finish.
        """


class LayerStore(Protocol):
    """The stage's model and optimizer as the rebuild sees them: prepare aside, then commit, or discard."""

    def prepare(self, plan: Plan, staged: Any) -> None:
        """Build the arriving layers beside the model and load their state. The model is not touched.

        `plan` stays the one in hand until `rewrap` or `discard`; every rank gets it, affected or not.
        """

    def discard(self) -> None:
        """Forget what was prepared; the model is as before."""

    def detach(self, layers: Sequence[int]) -> None:
        """Make ready to let layers go: after it the model cannot train until `publish`, `attach` and `rewrap` are done."""

    def attach(self, layers: Sequence[int]) -> None:
        """Give every chunk the layers of the published layout, the optimizer what belongs to them, both in layer order."""

    def publish(self, layout: Layout) -> None:
        """Make Megatron's config carry `layout`. Called on every rank, affected or not."""

    def rewrap(self) -> None:
        """Rebuild gradient buffers, hooks and sharded optimizer state around the changed model. Only on affected stages."""


class PeakMemory(Protocol):
    """How much more memory a stretch of work needs than was in use when it began."""

    def start(self) -> None:
        """The stretch begins."""

    def stop(self) -> int | None:
        """Bytes at the peak since `start` beyond those in use then; None where that cannot be seen."""


class Sink(Protocol):
    """Where a finished round goes."""

    def write(self, report: RoundReport) -> None:
        """Record one round, or record it again with more fields filled (same `round`)."""

    def close(self) -> None:
        """Flush and release."""
