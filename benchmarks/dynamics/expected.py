"""What a layer should cost once a family is at work, from what it cost before: the curves beside the measured ones."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.dynamics.costs import Point
from megatron_dyn.cli.freeze import frozen_costs
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule
from megatron_dyn.records import Cost

Curve = Callable[[Sequence[Point]], list[list[float]]]
"""By point and layer: expected seconds of one micro-batch. It takes what layers cost while the family had done nothing,
and of every point only what it had done by then."""


def untouched(points: Sequence[Point], touched: Sequence[bool]) -> list[Cost]:
    """By layer: the median of the leading points at which the family had not begun; of the first one where it had."""
    num_quiet = max(1, next((index for index, begun in enumerate(touched) if begun), len(points)))
    return [
        Cost(
            forward_seconds=median(cost.forward_seconds for cost in costs),
            backward_seconds=median(cost.backward_seconds for cost in costs),
        )
        for costs in zip(*(point.layers for point in points[:num_quiet]), strict=True)
    ]


def frozen_curve(schedule: FreezeSchedule) -> Curve:
    """A frozen prefix has its forward only, a frozen layer behind one that trains half of its backward besides."""

    def curve(points: Sequence[Point]) -> list[list[float]]:
        # What is frozen in the last step of a point was frozen after the one before that.
        frozen = [schedule.frozen(point.step - 1) for point in points]
        before = untouched(points, [bool(layers) for layers in frozen])
        return [[cost.seconds for cost in frozen_costs(before, layers)] for layers in frozen]

    return curve


def attention_share(*, hidden_size: int, seq_length: int, feed_forward: float = 1.0) -> float:
    """The share of a layer's products that has no weights: scores and their sum, 2 s h of 12 h^2 + 2 s h for a token.

    `feed_forward` is how many feed-forward layers a token passes.
    """
    weightless = 2 * seq_length * hidden_size
    return weightless / (weightless + hidden_size**2 * (4 + 8 * feed_forward))


def linear_curve(*, hidden_size: int, seq_length: int) -> Curve:
    """The linear layers cost what is left of their weights; attention itself is as before."""
    rest = attention_share(hidden_size=hidden_size, seq_length=seq_length)

    def curve(points: Sequence[Point]) -> list[list[float]]:
        before = untouched(points, [any(map(sparsity, point.notes)) for point in points])
        return [
            [
                cost.seconds * (rest + (1.0 - rest) * (1.0 - sparsity(notes)))
                for cost, notes in zip(before, point.notes, strict=True)
            ]
            for point in points
        ]

    return curve


def kernel_curve(*, hidden_size: int, num_tokens: int, seconds_of: Callable[[int, int, float, int], float]) -> Curve:
    """The linear layers cost what their kernels were seen to take alone; the rest of the layer is as before.

    `seconds_of(outputs, inputs, density, num_tokens)` is that of all three products with one weight.
    """
    shapes = [(3 * hidden_size, hidden_size), (hidden_size, hidden_size), (4 * hidden_size, hidden_size)]
    shapes.append((hidden_size, 4 * hidden_size))

    def linear(density: float) -> float:
        return sum(seconds_of(*shape, density, num_tokens) for shape in shapes)

    def curve(points: Sequence[Point]) -> list[list[float]]:
        before = untouched(points, [any(map(sparsity, point.notes)) for point in points])
        return [
            [
                cost.seconds - linear(1.0) + linear(round(1.0 - sparsity(notes), 3))
                for cost, notes in zip(before, point.notes, strict=True)
            ]
            for point in points
        ]

    return curve


def sparsity(notes: Mapping[str, Any]) -> float:
    """The share of a layer's weights that is pruned; 0 before the first level."""
    return float(notes.get("prune", {}).get("sparsity", 0.0))


def token_curve(*, hidden_size: int, seq_length: int, topk: int) -> Curve:
    """The experts' share of a layer follows the tokens they take, relative to the first point; a dense layer is as before."""
    rest = attention_share(hidden_size=hidden_size, seq_length=seq_length, feed_forward=topk)
    # Attention's own projections are linear as well, but see every token.
    weights = hidden_size**2 * (4 + 8 * topk) / (1.0 - rest)
    experts = hidden_size**2 * 8 * topk / weights

    def curve(points: Sequence[Point]) -> list[list[float]]:
        first = [tokens(notes) for notes in points[0].notes]
        return [
            [
                cost.seconds * (1.0 - experts + experts * tokens(notes) / was) if was else cost.seconds
                for cost, notes, was in zip(points[0].layers, point.notes, first, strict=True)
            ]
            for point in points
        ]

    return curve


def tokens(notes: Mapping[str, Any]) -> float:
    """The tokens that a layer's experts took in a step; 0 for a dense layer."""
    told = notes.get("moe")
    return sum(told["tokens_per_expert"]) / told["steps"] if told else 0.0
