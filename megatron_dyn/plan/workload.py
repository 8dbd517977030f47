"""What is known of a job's costs, and what any layout would make of them: chunk times, ends, memory.

Built from a Snapshot by `decide`, or from a timing file by the command. It must not know how splits are found.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from megatron_dyn.records import Chunk, Cost, Layout, Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkTimes:
    """Seconds by chunk of a layout, in layer order: chunk `c` runs on pp_rank `c % num_stages`."""

    num_stages: int
    forward_seconds: tuple[float, ...]
    """Of one micro-batch."""
    backward_seconds: tuple[float, ...]
    """Of one micro-batch."""
    p2p_seconds: tuple[float, ...]
    """What one tensor takes from chunk `c` to chunk `c + 1`, and a gradient back: one less than chunks."""
    optimizer_seconds: tuple[float, ...]
    """Of one step, by pp_rank."""

    @property
    def stage_seconds(self) -> tuple[float, ...]:
        """By pp_rank: forward and backward of one micro-batch, over all chunks."""
        chunks = [sum(pair) for pair in zip(self.forward_seconds, self.backward_seconds, strict=True)]
        return tuple(sum(chunks[pp_rank :: self.num_stages]) for pp_rank in range(self.num_stages))


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job's costs on stages of speed 1. Seconds are per micro-batch unless the name says otherwise."""

    layers: tuple[Cost, ...]
    """By global layer id."""
    embedding: Cost = Cost()
    head: Cost = Cost()
    """Final norm, head and loss."""
    mtp: Cost = Cost()
    """All MTP layers together."""
    other_seconds: float = 0.0
    """On every chunk, whatever it holds; half in the forward."""
    num_microbatches: int
    p2p_seconds: float | tuple[float, ...] = 0.0
    """Between pp_rank `s` and `s + 1`: one number, or one for each boundary; with virtual stages one more, from the last
    rank back to the first."""
    speeds: tuple[float, ...] | None = None
    """By pp_rank: how many times faster than the costs say; None: all 1."""
    uncut: tuple[int, ...] = ()
    """Layers that must be on one chunk with the layer before them: they share state."""

    def chunk_times(self, layout: Layout) -> ChunkTimes:
        """What each chunk of `layout` takes; raises ValueError when it does not place these layers."""
        layout.check_num_layers(len(self.layers))
        forward, backward = [], []
        optimizer = [0.0] * layout.num_stages
        for index, pieces in enumerate(self._pieces(layout)):
            pp_rank = index % layout.num_stages
            speed = self.speed(pp_rank)
            half = self.other_seconds / 2
            forward.append(math.fsum([half, *(piece.forward_seconds for piece in pieces)]) / speed)
            backward.append(math.fsum([half, *(piece.backward_seconds for piece in pieces)]) / speed)
            optimizer[pp_rank] += math.fsum(piece.optimizer_seconds for piece in pieces) / speed
        return ChunkTimes(
            num_stages=layout.num_stages,
            forward_seconds=tuple(forward),
            backward_seconds=tuple(backward),
            p2p_seconds=self._p2p(len(layout.chunks), layout.num_stages),
            optimizer_seconds=tuple(optimizer),
        )

    def speed(self, pp_rank: int) -> float:
        """How many times faster `pp_rank` is than the costs say."""
        return 1.0 if self.speeds is None else self.speeds[pp_rank]

    def state_bytes(self, layout: Layout) -> tuple[int, ...]:
        """Parameters, gradients and optimizer state by chunk of `layout`."""
        return tuple(sum(piece.state_bytes for piece in pieces) for pieces in self._pieces(layout))

    def activation_bytes(self, layout: Layout) -> tuple[int, ...]:
        """What one micro-batch keeps for its backward, by chunk of `layout`."""
        return tuple(sum(piece.activation_bytes for piece in pieces) for pieces in self._pieces(layout))

    def _pieces(self, layout: Layout) -> list[list[Cost]]:
        boundaries = pairwise(accumulate(layout.counts, initial=0))
        return [
            [*self.layers[start:end], *self._ends(chunk)] for chunk, (start, end) in zip(layout.chunks, boundaries, strict=True)
        ]

    def _ends(self, chunk: Chunk) -> list[Cost]:
        return [self.embedding] * chunk.embedding + [self.mtp] * bool(chunk.num_mtp) + [self.head] * chunk.loss

    def _p2p(self, num_chunks: int, num_stages: int) -> tuple[float, ...]:
        if isinstance(self.p2p_seconds, int | float):
            return (float(self.p2p_seconds),) * (num_chunks - 1)
        expected = (num_stages - 1, num_stages) if num_chunks == num_stages else (num_stages,)
        if len(self.p2p_seconds) not in expected:
            raise ValueError(f"p2p_seconds: expected a number or {expected[0]} numbers, got {len(self.p2p_seconds)}")
        return tuple(self.p2p_seconds[index % num_stages] for index in range(num_chunks - 1))


def workload_of(snapshot: Snapshot, *, speeds: Sequence[float] | None = None) -> Workload:
    """The workload that `snapshot` measured; `speeds`, by pp_rank, takes what slow and fast ranks add out of the costs."""
    layout = snapshot.layout
    rates = [1.0] * layout.num_stages if speeds is None else list(speeds)
    stage_of = layout.stage_of()
    layers = (
        at_speed_one(_with_optimizer(cost, snapshot, stage_of[layer]), rates[stage_of[layer]])
        for layer, cost in enumerate(snapshot.layers)
    )
    first = next(index for index, chunk in enumerate(layout.chunks) if chunk.embedding) % layout.num_stages
    last = next(index for index, chunk in enumerate(layout.chunks) if chunk.loss) % layout.num_stages
    return Workload(
        layers=tuple(layers),
        embedding=at_speed_one(snapshot.embedding, rates[first]),
        head=at_speed_one(snapshot.head, rates[last]),
        # Measured by stage, over all its chunks.
        other_seconds=snapshot.other_seconds / layout.num_virtual,
        num_microbatches=snapshot.num_microbatches,
        speeds=None if speeds is None else tuple(rates),
    )


def _with_optimizer(cost: Cost, snapshot: Snapshot, pp_rank: int) -> Cost:
    """`cost` with its share, by weight, of what the optimizer of its stage took; unchanged where that is not known."""
    if not snapshot.stages or not snapshot.stages[pp_rank].state_bytes or cost.optimizer_seconds:
        return cost
    stage = snapshot.stages[pp_rank]
    return replace(cost, optimizer_seconds=stage.optimizer_seconds * cost.state_bytes / stage.state_bytes)


def at_speed_one(cost: Cost, speed: float) -> Cost:
    """What a stage of speed 1 would have taken for what one of `speed` took."""
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * speed,
        backward_seconds=cost.backward_seconds * speed,
        backward_weight_seconds=cost.backward_weight_seconds * speed,
        optimizer_seconds=cost.optimizer_seconds * speed,
    )
