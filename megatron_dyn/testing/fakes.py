"""Stand-ins for what a round works with on one rank: layers are small tensors, and time is set by hand.

They keep the contracts of `ports` and of `controller.Profiler`, and can be told to fail (`testing.faults`). Together
with `testing.threads` they run whole rounds in one process. Must not know Megatron; shipped, so that code built on the
plugin can be tested with them too.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_dyn.measure import Footprint, Kind, Position, Slot, StepReading
from megatron_dyn.migrate import Key, LayerState, Manifest, Ranges, Seat, Shard, ShardKey, Staged
from megatron_dyn.records import Cost, Layout, Plan, RoundReport
from megatron_dyn.testing.faults import Faults, Operation


class FakeClock:
    """Implements ports.Clock; time moves by `advance` alone. Marks can be read only after `settle`, as on a GPU."""

    def __init__(self, now: float = 0.0) -> None:
        """Start at `now` seconds."""
        self.now = now
        self._settled = now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    def mark(self) -> float:
        """See ports.Clock."""
        return self.now

    def settle(self) -> None:
        """See ports.Clock."""
        self._settled = self.now

    def seconds_between(self, start: float, end: float) -> float:
        """See ports.Clock; raises AssertionError for a mark that was not settled."""
        if max(start, end) > self._settled:
            raise AssertionError(f"mark at {max(start, end)} s is read before settle (last at {self._settled} s)")
        return end - start


def small_layer(layer: int, *, num_elements: int = 6) -> LayerState:
    """A layer with one of everything that travels, of values that differ from layer to layer."""
    ramp = torch.arange(num_elements, dtype=torch.float32) + 100.0 * layer
    return LayerState(
        layer=layer,
        tensors={
            Key("parameter", "weight"): ramp.to(torch.bfloat16),
            Key("main", "weight"): ramp / 3,
            Key("optimizer:exp_avg", "weight"): ramp / 7,
            Key("buffer", "mask"): ramp.to(torch.int64) % 2 == 0,
        },
        scalars={"weight": {"step": 10 + layer}},
    )


class MemoryStore:
    """Implements ports.LayerStore on plain LayerStates; also exports them. Remembers every call, in order."""

    def __init__(self, rank: int, layers: Sequence[int], *, faults: Faults | None = None) -> None:
        """Global rank `rank` starts with a `small_layer` for each id in `layers`."""
        self.rank = rank
        self.layers = {layer: small_layer(layer) for layer in layers}
        self.layout: Layout | None = None
        """What was published last."""
        self.calls: list[tuple[str, object]] = []
        """(operation, its argument) of every LayerStore call."""
        self._faults = faults or Faults()
        self._prepared: dict[int, LayerState] = {}

    def export(self, layer: int) -> LayerState:
        """The live state of a local layer; KeyError when it is not here."""
        self._faults.check(Operation.EXPORT, self.rank)
        return self.layers[layer]

    def quiesce(self) -> None:
        """See migrate.Source."""
        self.calls.append(("quiesce", None))

    def shards(self, plan: Plan) -> Mapping[ShardKey, Shard]:
        """See migrate.Source; nothing is sharded here."""
        return {}

    def outline(self, plan: Plan, arriving: Mapping[int, Manifest]) -> Ranges:
        """See migrate.Source."""
        return {}

    def prepare(self, plan: Plan, staged: Staged) -> None:
        """See ports.LayerStore. The staged tensors become the layer's own, as in the real store."""
        self.calls.append(("prepare", sorted(staged.states)))
        for layer in list(staged.states):
            self._prepared[layer] = staged.states.pop(layer)
        self._faults.check(Operation.PREPARE, self.rank)

    def discard(self) -> None:
        """See ports.LayerStore."""
        self.calls.append(("discard", None))
        self._prepared.clear()

    def detach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore; KeyError for a layer that is not here."""
        self._note(Operation.DETACH, tuple(layers))
        for layer in layers:
            del self.layers[layer]

    def attach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore; KeyError for a layer that was not prepared."""
        self._note(Operation.ATTACH, tuple(layers))
        self.layers |= {layer: self._prepared.pop(layer) for layer in layers}
        self.layers = dict(sorted(self.layers.items()))

    def publish(self, layout: Layout) -> None:
        """See ports.LayerStore."""
        self._note(Operation.PUBLISH, layout)
        self.layout = layout

    def rewrap(self) -> None:
        """See ports.LayerStore."""
        self._note(Operation.REWRAP, None)

    def _note(self, operation: Operation, argument: object) -> None:
        self.calls.append((operation.value, argument))
        self._faults.check(operation, self.rank)


class FakePeakMemory:
    """Implements ports.PeakMemory: every stretch of work needs `extra_bytes` more."""

    def __init__(self, extra_bytes: int | None = None) -> None:
        """None: it cannot be seen."""
        self.extra_bytes = extra_bytes
        self._running = False

    def start(self) -> None:
        """See ports.PeakMemory."""
        self._running = True

    def stop(self) -> int | None:
        """See ports.PeakMemory; raises AssertionError when no stretch has begun."""
        if not self._running:
            raise AssertionError("peak memory read, but it was not started")
        self._running = False
        return self.extra_bytes


class RecordingSink:
    """Implements ports.Sink in memory."""

    def __init__(self) -> None:
        self.written: list[RoundReport] = []
        """Every report, also those that were written again."""
        self.num_closed = 0

    @property
    def rounds(self) -> list[RoundReport]:
        """The last word on each round, in order."""
        return list({report.round: report for report in self.written}.values())

    def write(self, report: RoundReport) -> None:
        """See ports.Sink."""
        self.written.append(report)

    def close(self) -> None:
        """See ports.Sink."""
        self.num_closed += 1


class FakeProfiler:
    """Implements controller.Profiler: a layer takes what `layer_seconds(step, layer)` says, a third of it forward."""

    def __init__(
        self,
        store: MemoryStore,
        seat: Seat,
        layer_seconds: Callable[[int, int], float],
        *,
        num_microbatches: int = 4,
        head_seconds: float = 0.0,
    ) -> None:
        """Times are seconds per micro-batch; the layers are those that `store` holds at the time."""
        self._store, self._seat = store, seat
        self._layer_seconds, self._head_seconds = layer_seconds, head_seconds
        self._num_microbatches = num_microbatches
        self.sampled_steps: list[int] = []
        """Steps that were sampled, in order."""
        self.num_layout_changes = 0
        self._running = False

    def start(self) -> None:
        """See controller.Profiler; raises AssertionError when it runs already."""
        if self._running:
            raise AssertionError("profiler started twice")
        self._running = True

    def stop(self, iteration: int) -> StepReading:
        """See controller.Profiler; raises AssertionError when it does not run."""
        if not self._running:
            raise AssertionError("profiler stopped, but it was not started")
        self._running = False
        self.sampled_steps.append(iteration)
        pieces = [(Kind.LAYER, layer, self._layer_seconds(iteration, layer)) for layer in self._store.layers]
        if self.position().has_head:
            pieces.append((Kind.HEAD, -1, self._head_seconds))
        seconds = {}
        for kind, layer, cost in pieces:
            seconds[Slot(kind, layer, backward=False)] = cost * self._num_microbatches / 3
            seconds[Slot(kind, layer, backward=True)] = cost * self._num_microbatches * 2 / 3
        return StepReading(iteration=iteration, num_microbatches=self._num_microbatches, seconds=seconds)

    def cancel(self) -> None:
        """See controller.Profiler."""
        self._running = False

    def position(self) -> Position:
        """See controller.Profiler."""
        return Position(
            global_rank=self._seat.global_rank,
            pp_rank=self._seat.pp_rank,
            layers=tuple(self._store.layers),
            has_embedding=self._seat.pp_rank == 0,
            has_head=self._seat.pp_rank == len(self._seat.pipeline_ranks) - 1,
        )

    def footprint(self) -> Footprint:
        """See controller.Profiler; every layer weighs what its tensors weigh."""
        sizes = {
            layer: sum(tensor.numel() * tensor.element_size() for tensor in state.tensors.values())
            for layer, state in self._store.layers.items()
        }
        layers = {layer: Cost(state_bytes=size, moved_bytes=size) for layer, size in sizes.items()}
        return Footprint(layers=layers, embedding=Cost(), head=Cost())

    def layout_changed(self) -> None:
        """See controller.Profiler."""
        self.num_layout_changes += 1
