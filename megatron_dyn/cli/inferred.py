"""What layers and ends cost when only the totals of whole stages are known.

Used by `timing_file`. It cannot tell layers of one stage apart, nor a slow rank from heavy layers: whoever shows its answer
must say that it is inferred.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from megatron_dyn.records import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class InferredCosts:
    """Forward plus backward seconds of one micro-batch. Under the layout they add up to the totals they come from."""

    layer_seconds: tuple[float, ...]
    """By global layer id."""
    embedding_seconds: float
    head_seconds: float
    """MTP layers included where they share the stage of the loss."""
    mtp_seconds: float
    """Of MTP layers on another stage than the loss."""
    how: str
    """One line for the user."""


def infer(layout: Layout, stage_seconds: Sequence[float]) -> InferredCosts:
    """Costs under which the stages of `layout` take `stage_seconds` (by pp_rank).

    A stage without ends is its layers, in equal parts. A stage with ends has layers that cost the median of those (the
    cheapest stage's, where all have ends), and the rest is the end; if nothing would be left for the end, it is its
    layers too. Raises ValueError when there is not one total for each stage, or no stage with layers takes time.
    """
    if len(stage_seconds) != layout.num_stages:
        raise ValueError(
            f"expected {layout.num_stages} totals, one for each stage of {layout.text!r}, got {len(stage_seconds)}"
        )
    embedding, mtp, loss = (_rank_of(layout, what) for what in ("embedding", "num_mtp", "loss"))
    stages = [layout.layers_of_stage(pp_rank) for pp_rank in range(layout.num_stages)]
    per_layer = {pp_rank: stage_seconds[pp_rank] / len(held) for pp_rank, held in enumerate(stages) if held}
    inner = [seconds for pp_rank, seconds in per_layer.items() if pp_rank not in (embedding, mtp, loss)]
    usual = median(inner) if inner else min(per_layer.values(), default=0.0)
    if usual <= 0.0:
        raise ValueError(f"expected a stage with layers that takes time, got {list(stage_seconds)}")
    layers, rest = [0.0] * layout.num_layers, [0.0] * layout.num_stages
    for pp_rank, held in enumerate(stages):
        left = stage_seconds[pp_rank] - usual * len(held)
        has_end = pp_rank in (embedding, mtp, loss) and left >= 0.0
        rest[pp_rank] = left if has_end else 0.0
        for layer in held:
            layers[layer] = usual if has_end else per_layer[pp_rank]
    apart = [pp_rank is not None and pp_rank != loss for pp_rank in (embedding, mtp)]
    first = rest[embedding] if embedding is not None and apart[0] else 0.0
    middle = rest[mtp] if mtp is not None and apart[1] and mtp != embedding else 0.0
    head = rest[loss] if loss is not None else 0.0
    basis = "the median over the stages without ends" if inner else "of the cheapest stage, since all stages hold ends"
    return InferredCosts(
        layer_seconds=tuple(layers),
        embedding_seconds=first,
        head_seconds=head,
        mtp_seconds=middle,
        how=(
            f"per-layer costs are inferred from stage totals, not measured: a layer is {usual:.4g} s ({basis}), the embedding "
            f"{first:.4g} s, {'MTP, ' * (mtp is not None and not apart[1])}head and loss {head:.4g} s"
            f"{f', MTP {middle:.4g} s' * apart[1]}; which layer of a stage is heavy cannot be told"
        ),
    )


def _rank_of(layout: Layout, what: str) -> int | None:
    return next((index % layout.num_stages for index, chunk in enumerate(layout.chunks) if getattr(chunk, what)), None)
