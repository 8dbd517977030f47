"""What a step costs under a layout: stage costs from a Snapshot, and a simulator of non-interleaved 1F1B.

Used by `decide` to compare two layouts and by tools to explain one. It must not know why a layout was chosen. All sums
over layers are `math.fsum`, so that ranks on different processors agree in every bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from megatron_dyn.records import Cost, Layout, Snapshot

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The outcome of one simulated step."""

    step_seconds: float
    """From the first forward to the last backward of any stage."""
    busy_seconds: tuple[float, ...]
    """By pp_rank: time spent computing."""
    bubble_fraction: float
    """Share of all stages' time that is spent waiting; 0 for a step that takes no time."""


def bubble_fraction(busy_seconds: Sequence[float], step_seconds: float) -> float:
    """Share of `step_seconds` that the stages, busy for `busy_seconds` each, spend waiting; 0 when nothing runs."""
    if step_seconds <= 0.0 or not busy_seconds:
        return 0.0
    return max(0.0, 1.0 - math.fsum(busy_seconds) / (len(busy_seconds) * step_seconds))


def stage_costs(snapshot: Snapshot, layout: Layout) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Forward and backward seconds of one micro-batch by pp_rank if `layout` held what `snapshot` measured.

    Embedding and head count where the layout has them; `other_seconds` was not split by direction, half of it goes to
    each. For layouts of one model chunk per stage.
    """
    other = Cost(forward_seconds=snapshot.other_seconds / 2, backward_seconds=snapshot.other_seconds / 2)
    forward, backward = [], []
    boundaries = pairwise(accumulate(layout.counts, initial=0))
    for chunk, (start, end) in zip(layout.chunks, boundaries, strict=True):
        pieces = [other, *snapshot.layers[start:end]]
        pieces += [snapshot.embedding] * chunk.embedding + [snapshot.head] * chunk.loss
        forward.append(math.fsum(piece.forward_seconds for piece in pieces))
        backward.append(math.fsum(piece.backward_seconds for piece in pieces))
    return tuple(forward), tuple(backward)


def simulate(
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    num_microbatches: int,
    p2p_seconds: float | Sequence[float] = 0.0,
) -> Timeline:
    """One step of Megatron's non-interleaved 1F1B with these costs per micro-batch, by stage.

    Stage `s` of `p` runs `min(p - s - 1, num_microbatches)` forwards, then one forward and one backward in turn, then
    the backwards left over. A forward waits for the same micro-batch from the stage before, a backward for that from
    the stage behind; what is sent arrives `p2p_seconds` later (one number, or one for each of the `p - 1` boundaries)
    and the sender does not wait. Raises ValueError for tables that do not fit together and for negative times.
    """
    p2p = [p2p_seconds] * (len(forward_seconds) - 1) if isinstance(p2p_seconds, int | float) else list(p2p_seconds)
    _check_tables(forward_seconds, backward_seconds, num_microbatches, p2p)
    ends = _run_levels(
        np.asarray(forward_seconds, dtype=np.float64),
        np.asarray(backward_seconds, dtype=np.float64),
        np.asarray(p2p, dtype=np.float64),
        num_microbatches,
    )
    step_seconds = float(ends.max())
    busy = tuple(
        num_microbatches * float(forward + backward)
        for forward, backward in zip(forward_seconds, backward_seconds, strict=True)
    )
    return Timeline(step_seconds=step_seconds, busy_seconds=busy, bubble_fraction=bubble_fraction(busy, step_seconds))


def _run_levels(forward: FloatArray, backward: FloatArray, p2p: FloatArray, num_microbatches: int) -> FloatArray:
    """When each stage is done, shape [stages].

    The operations of a step fall into levels such that each needs only operations of lower levels, and each stage has
    at most one per level (they are the time slots of a schedule in which every operation takes one slot):
    forward `i` of stage `s` is at `s + i` in the warm-up and at `s + 2i` later, backward `j` at `2p - 1 - s + 2j`.
    The stages of one level form a slice: `2 (m + p - 1)` steps of vector arithmetic replace `2 m p` scalar operations.
    """
    num_stages = len(forward)
    free = np.zeros(num_stages)
    # When the newest activation (gradient) for stage s is there: entry s (entry s + 1). The ends stay 0: nobody waits.
    activation_ready, gradient_ready = np.zeros(num_stages + 1), np.zeros(num_stages + 1)
    to_next, to_previous = np.append(p2p, 0.0), np.append(0.0, p2p)
    for level in range(2 * (num_microbatches + num_stages - 1)):
        here = _forward_slice(level, num_stages, num_microbatches)
        behind = slice(here.start + 1, here.stop + 1, here.step)
        free[here] = np.maximum(free[here], activation_ready[here]) + forward[here]
        activation_ready[behind] = free[here] + to_next[here]
        here = _backward_slice(level, num_stages, num_microbatches)
        behind = slice(here.start + 1, here.stop + 1, here.step)
        free[here] = np.maximum(free[here], gradient_ready[behind]) + backward[here]
        gradient_ready[here] = free[here] + to_previous[here]
    return free


def _forward_slice(level: int, num_stages: int, num_microbatches: int) -> slice:
    if level < num_stages - 1:
        return slice(max(0, level - num_microbatches + 1), level + 1, 1)
    return slice(max(2 * num_stages - 2 - level, level - 2 * num_microbatches + 2, level % 2), num_stages, 2)


def _backward_slice(level: int, num_stages: int, num_microbatches: int) -> slice:
    first = 2 * num_stages - 1 - level
    return slice(max(first, first % 2), min(num_stages, first + 2 * num_microbatches), 2)


def _check_tables(forward: Sequence[float], backward: Sequence[float], num_microbatches: int, p2p: Sequence[float]) -> None:
    if not forward or len(forward) != len(backward) or len(p2p) != len(forward) - 1:
        raise ValueError(
            f"simulate: expected times for equally many stages and one less boundary, got {len(forward)} forward, "
            f"{len(backward)} backward, {len(p2p)} p2p"
        )
    if num_microbatches < 1:
        raise ValueError(f"simulate: expected at least 1 micro-batch, got {num_microbatches}")
    for name, table in (("forward", forward), ("backward", backward), ("p2p", p2p)):
        for position, seconds in enumerate(table):
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"simulate: {name}_seconds[{position}]: expected a time of at least 0, got {seconds}")
