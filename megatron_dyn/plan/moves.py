"""Which layers change their stage between two layouts, by global layer id.

Used by `decide` and by whoever forces a layout. It must not know costs: it says what moves, not whether that pays.
"""

from megatron_dyn.records import Layout, Move


def moves_between(before: Layout, after: Layout) -> tuple[Move, ...]:
    """One Move for each layer that `after` places on another pipeline stage than `before`, by ascending layer id.

    Pure: every rank gets the same moves in the same order. Raises ValueError when the layouts cannot be of one model,
    or place the embedding, the MTP layers or the loss on different stages, since a Move carries decoder layers only.
    """
    if before.num_layers != after.num_layers:
        raise ValueError(
            f"moves_between: layouts of different models: {before.text!r} places {before.num_layers} layers, "
            f"{after.text!r} places {after.num_layers}"
        )
    for name, here, there in zip(("embedding", "MTP", "loss"), _pinned(before), _pinned(after), strict=True):
        if here != there:
            raise ValueError(
                f"moves_between: only decoder layers move, but {before.text!r} has {name} as {_show(here)} and "
                f"{after.text!r} as {_show(there)}"
            )
    return tuple(
        Move(layer=layer, source=source, destination=destination)
        for layer, (source, destination) in enumerate(zip(before.stage_of(), after.stage_of(), strict=True))
        if source != destination
    )


def _pinned(layout: Layout) -> tuple[tuple[tuple[int, int], ...], ...]:
    """(pp_rank, how many) of each holder of the embedding, of MTP layers and of the loss."""
    columns = (
        [int(chunk.embedding) for chunk in layout.chunks],
        [chunk.num_mtp for chunk in layout.chunks],
        [int(chunk.loss) for chunk in layout.chunks],
    )
    return tuple(tuple((index % layout.num_stages, count) for index, count in enumerate(column) if count) for column in columns)


def _show(holders: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{count} on stage {stage}" for stage, count in holders) or "none"
