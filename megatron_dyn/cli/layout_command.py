"""`megatron-dyn layout`: what a layout string means, or the one Megatron makes from counts. Needs no timing file."""

import argparse
from collections.abc import Iterator
from typing import Any

from megatron_dyn.cli.arguments import MAX_LAYERS, MAX_STAGES, count, up_to
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.output import console, say, spans, table, write_json
from megatron_dyn.records import Chunk, Layout, uniform_layout

DESCRIPTION = (
    "Explain a layout in Megatron's syntax: who holds which layers and ends. E is the embedding, t a decoder layer, m an MTP "
    "layer, L the loss; | separates stages, *N repeats a letter or a group in parentheses, commas mean nothing."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("layout", help="explain a layout string", description=DESCRIPTION)
    parser.add_argument("text", nargs="?", metavar="LAYOUT", help="the value of --pipeline-model-parallel-layout")
    parser.add_argument(
        "--pp", type=up_to(MAX_STAGES), metavar="P", help="pipeline stages; default: one for each part, no virtual stages"
    )
    parser.add_argument(
        "--num-layers",
        type=up_to(MAX_LAYERS),
        metavar="N",
        help="instead of LAYOUT: the split Megatron makes of N layers; with it: what it must add up to",
    )
    parser.add_argument("--first", type=count, metavar="A", help="with --num-layers: --decoder-first-pipeline-num-layers")
    parser.add_argument("--last", type=count, metavar="B", help="with --num-layers: --decoder-last-pipeline-num-layers")
    parser.add_argument("--json", action="store_true", help="write JSON and nothing else to stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain; returns 0. Raises LayoutError naming the bad token, InputError for flags that do not go together."""
    layout = _layout(args)
    if args.json:
        write_json(layout_json(layout))
        return 0
    say(f"layout: {layout.text}", _shape(layout), *(f"note:   {note}" for note in oddities(layout)))
    rows = []
    for pp_rank in range(layout.num_stages):
        chunks = layout.chunks[pp_rank :: layout.num_stages]
        texts, layers = [chunk.text or "-" for chunk in chunks], map(spans, layout.layers_by_chunk(pp_rank))
        rows.append((str(pp_rank), str(len(layout.layers_of_stage(pp_rank))), " | ".join(texts), " | ".join(layers)))
    by_chunk = " by virtual stage" if layout.num_virtual > 1 else ""
    console().print(table(f"stages{by_chunk}", ("stage", "layers", "holds", "layer ids"), rows, left=("holds", "layer ids")))
    return 0


def layout_json(layout: Layout) -> dict[str, Any]:
    """Everything that a layout says, as plain data; layer ids are global and 0-based."""
    return {
        "layout": layout.text,
        "num_layers": layout.num_layers,
        "num_stages": layout.num_stages,
        "num_virtual": layout.num_virtual,
        "embedding": _place(layout, _holder(layout, "embedding")),
        "mtp": _place(layout, _holder(layout, "num_mtp")),
        "loss": _place(layout, _holder(layout, "loss")),
        "stages": [
            {
                "pp_rank": pp_rank,
                "num_layers": len(layout.layers_of_stage(pp_rank)),
                "layers": list(layout.layers_of_stage(pp_rank)),
                "chunks": [
                    {
                        "virtual": virtual,
                        "text": chunk.text,
                        "layers": list(layers),
                        "embedding": chunk.embedding,
                        "num_mtp": chunk.num_mtp,
                        "loss": chunk.loss,
                    }
                    for virtual, (chunk, layers) in enumerate(
                        zip(layout.chunks[pp_rank :: layout.num_stages], layout.layers_by_chunk(pp_rank), strict=True)
                    )
                ],
            }
            for pp_rank in range(layout.num_stages)
        ],
        "notes": list(oddities(layout)),
    }


def oddities(layout: Layout) -> Iterator[str]:
    """What Megatron accepts and readers do not expect, one line each."""
    mtp, loss = _holder(layout, "num_mtp"), _holder(layout, "loss")
    if loss is not None and loss % layout.num_stages != layout.num_stages - 1:
        yield f"the loss is on stage {_where(layout, loss)}, not on the last stage"
    if mtp is not None and mtp % layout.num_stages != layout.num_stages - 1:
        yield f"the MTP layers are on stage {_where(layout, mtp)}, apart from the last stage (standalone MTP)"
    for index, chunk in enumerate(layout.chunks):
        if chunk == Chunk():
            yield f"stage {_where(layout, index)} holds nothing"
        elif not chunk.num_layers:
            yield f"stage {_where(layout, index)} holds no decoder layer, only {chunk.text}"


def _layout(args: argparse.Namespace) -> Layout:
    counts = [f"--{name}" for name in ("first", "last") if getattr(args, name) is not None]
    if args.text is not None:
        if counts:
            raise InputError(f"layout: expected {counts[0]} with --num-layers and no LAYOUT, got LAYOUT {args.text!r}")
        layout = Layout.parse(args.text, args.pp)
        if args.num_layers is not None:
            layout.check_num_layers(args.num_layers)
        return layout
    if args.num_layers is None or args.pp is None:
        raise InputError("layout: expected a LAYOUT, or --num-layers with --pp, got neither")
    return uniform_layout(args.num_layers, args.pp, first=args.first, last=args.last)


def _shape(layout: Layout) -> str:
    virtual = f" x {layout.num_virtual} virtual" if layout.num_virtual > 1 else ""
    num_mtp = sum(chunk.num_mtp for chunk in layout.chunks)
    mtp = f" and {num_mtp} MTP" if num_mtp else ""
    holders = (
        (name, _holder(layout, what)) for name, what in (("embedding", "embedding"), ("MTP", "num_mtp"), ("loss", "loss"))
    )
    ends = ", ".join(f"{name} on stage {_where(layout, index)}" for name, index in holders if index is not None)
    return f"shape:  {layout.num_layers} layers{mtp} on {layout.num_stages} stages{virtual}; {ends}"


def _holder(layout: Layout, what: str) -> int | None:
    return next((index for index, chunk in enumerate(layout.chunks) if getattr(chunk, what)), None)


def _where(layout: Layout, index: int) -> str:
    virtual = f" (virtual {index // layout.num_stages})" if layout.num_virtual > 1 else ""
    return f"{index % layout.num_stages}{virtual}"


def _place(layout: Layout, index: int | None) -> dict[str, int] | None:
    return None if index is None else {"pp_rank": index % layout.num_stages, "virtual": index // layout.num_stages}
