"""What a stage needs from the outside world, as Protocols. The host supplies them; tests supply fakes.

Nothing here may import torch: a buffer is opaque to everything but `migrate` and `host`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a dynamic family did to the model at one step boundary; the same on every rank. One line of dynamics.jsonl."""

    family: str
    iteration: int
    """Finished iterations: it holds from the next one on."""
    what: str
    """One line for people: `layers 0-7 frozen`."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """JSON-ready facts for machines."""
    changes_costs: bool = True
    """Whether layers take another time from now on, so that what was measured before is stale."""


class Job(Protocol):
    """What a dynamic family may ask of the job it runs in. The host implements it; one per rank."""

    @property
    def args(self) -> Any:
        """Megatron's validated arguments."""

    @property
    def layers(self) -> Mapping[int, Any]:
        """The decoder layers (modules) on this rank by global id, in order; it follows every move."""

    @property
    def embedding(self) -> Any | None:
        """The embedding module where it is on this rank."""

    @property
    def learning_rate(self) -> float:
        """The largest of any parameter group in the step that just ended."""

    def gather(self, value: Any, what: str) -> list[Any]:
        """See Collective.gather. All ranks must call."""

    def sum_counts(self, counts: Any, what: str) -> Any:
        """The elementwise sum over all ranks of an int64 CPU tensor of the same shape everywhere. All ranks must call."""

    def counts_here(self, parameter: Any) -> bool:
        """Whether this rank is the one that speaks for the (slice of the) parameter: true on exactly one of its replicas."""

    def gradient_norms(self) -> Sequence[float]:
        """2-norm of the gradient of every decoder layer by global id, 0.0 where it has none, the same on every rank.

        Exact, so that it depends neither on the layout nor on how the optimizer shards; what is trainable counts. All
        ranks must call, after the gradients were reduced and before the optimizer (`Dynamic.after_gradients`).
        """

    def settle_parameters(self) -> None:
        """Make every local parameter what the optimizer left: with overlapped gathers that is so from the next forward on only.

        All ranks must call, at a step boundary, before weights are read.
        """

    def silence(self, masks: Mapping[Any, Any]) -> None:
        """Clear weight, main parameter and moments of local parameters wherever their mask (bool, same shape) is False."""

    def set_trainable(self, frozen_layers: frozenset[int], *, embedding_frozen: bool, park: bool) -> None:
        """Freeze exactly these decoder layers, let all others train, and rebuild what hangs on that where it changed.

        Gradient buffers, hooks and optimizer of the affected chunks are made anew around the parameters that train. The
        optimizer state of what freezes is dropped, or with `park` kept for when it trains again; without parked state a
        layer starts with fresh moments. All ranks must call, at a step boundary, with the same arguments.
        """


class Dynamic(Protocol):
    """A family of dynamic models: what it does to the model, and when. Subclass it; every method has a default.

    One object per rank. In the order of a job's life: `check` and `layer_spec` before the model is built, `attach` for each
    layer when it is built (also when it arrives from another rank, before its state is loaded), `begin` when model and
    optimizer exist, `start` when a checkpoint is loaded too, then `before_step`, `after_gradients` and `at_boundary` in every
    step. All are called on all ranks with the same steps. What a layer carries has to be a buffer or parameter of its
    module: then it moves and is saved with the layer.
    """

    name: str
    """The word behind `--dyn-`: `freeze`."""
    freezes: bool = False
    """Whether it calls `Job.set_trainable`: the schedule then has to know of frozen prefixes."""
    keeps_layers_apart: bool = False
    """Whether layers may differ in what they carry or in what the optimizer holds of them, so that a checkpoint has to
    name each layer (Megatron's non-homogeneous keys) and cannot stack them."""

    def check(self, args: Any, others: Sequence[str]) -> None:
        """Refuse what cannot be had: raise ConfigError naming the flag. `others` are the names of the other families."""

    def layer_spec(self, layer: int, spec: Any) -> Any:
        """The module spec that decoder layer `layer` is to be built from, given Megatron's; must stay picklable."""
        return spec

    def attach(self, layer: int, module: Any) -> None:
        """Dress a decoder layer that was just built: hooks, buffers, submodules."""

    def begin(self, job: Job, step: int, state: Any) -> None:
        """Model and optimizer exist, nothing is loaded yet. `step` iterations are finished; `state` is what `state()` gave
        when the checkpoint was written that is about to be loaded, None in a fresh run or where it has none."""

    def start(self, step: int) -> None:
        """Weights are final and the first step (`step` + 1) is about to begin."""

    def before_step(self, step: int) -> None:
        """Step `step` (1-based) begins."""

    def after_gradients(self, step: int) -> None:
        """The gradients of step `step` are complete and reduced; norm, clipping and optimizer come next."""

    def at_boundary(self, step: int) -> Sequence[Change]:
        """Step `step` is over and the next has not begun: change the model now. Returns what was changed."""
        return ()

    def cost_changes(self) -> tuple[int, ...]:
        """Finished iterations after which costs are known to change, ascending; asked once, before the model is built."""
        return ()

    def state(self) -> Any:
        """What `begin` needs to go on from here: small, the same on every rank, and plain data (numbers, strings, and lists,
        tuples and dicts of them), since checkpoints are loaded without trusting classes. Never mutate one given out."""
        return None

    def notes(self, layer: int) -> Mapping[str, Any]:
        """JSON-ready facts on a local layer for the report of a round."""
        return {}
