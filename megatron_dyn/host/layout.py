"""Between our Layout record and Megatron's: its model config, its arguments, and so the arguments in its checkpoints."""

from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megatron_dyn.ports import JobError
from megatron_dyn.records import Layout, uniform_layout

STAMP = "dyn_layout_in_force"
"""Attribute of Megatron's arguments, and so of every checkpoint: `<stages>:<layout>`, such as `2:Et*5|t*3L`."""


def layout_of_args(args: Any) -> Layout:
    """The layout that Megatron will build for these (validated) arguments. Raises LayoutError."""
    num_stages = args.pipeline_model_parallel_size
    if args.pipeline_model_parallel_layout is not None:
        layout = Layout.parse(str(args.pipeline_model_parallel_layout), num_stages)
        layout.check_num_layers(args.num_layers)
        return layout
    num_virtual = args.virtual_pipeline_model_parallel_size or 1
    embedding, loss = (int(bool(getattr(args, f"account_for_{end}_in_pipeline_split", False))) for end in ("embedding", "loss"))
    if embedding or loss:
        counts = list(uniform_layout(args.num_layers + embedding + loss, num_stages * num_virtual).counts)
        counts[0] -= embedding
        counts[-1] -= loss
    else:
        # Megatron spreads the layers of a rank evenly over its virtual stages, those of the first and last rank too.
        first, last = args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers
        per_rank = uniform_layout(args.num_layers, num_stages, first=first, last=last).counts
        counts = [count // num_virtual for count in per_rank] * num_virtual
    layout = Layout.contiguous(counts, num_stages=num_stages)
    layout.check_num_layers(args.num_layers)
    if mtp := getattr(args, "mtp_num_layers", None):
        layout = replace(layout, chunks=(*layout.chunks[:-1], replace(layout.chunks[-1], num_mtp=mtp)))
    return layout


def publish(config: Any, args: Any, layout: Layout) -> None:
    """Make `layout` Megatron's own on this rank: offsets, checkpoints and the saved arguments all follow."""
    text = layout.text
    host_layout = PipelineParallelLayerLayout(text, layout.num_stages)
    host_layout.validate_layer_layout(num_layers=config.num_layers, mtp_num_layers=config.mtp_num_layers)
    config.pipeline_model_parallel_layout = host_layout
    args.pipeline_model_parallel_layout = text
    stamp(args, layout)


def stamp(args: Any, layout: Layout) -> None:
    """Let checkpoints that are written from now on say, as plain text, which layout they were written at."""
    setattr(args, STAMP, f"{layout.num_stages}:{layout.text}")


def stamped_layout(args: Any) -> Layout | None:
    """The layout on a checkpoint's arguments; None where the plugin did not write it. Raises ValueError if it is damaged."""
    text = getattr(args, STAMP, None)
    if text is None:
        return None
    num_stages, _, layout = text.partition(":")
    return Layout.parse(layout, int(num_stages))


def layer_offset(config: Any, vp_stage: int | None = None) -> int:
    """Global id of the first layer of this rank's chunk `vp_stage` under the layout in force."""
    return int(get_transformer_layer_offset(config, vp_stage))


def check_built(layout: Layout, layers: tuple[int, ...]) -> None:
    """Raise JobError unless the stage that Megatron built on this rank is what `layout` says."""
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    if layers != layout.layers_of_stage(pp_rank):
        raise JobError(
            f"stage {pp_rank}: layout {layout.text!r} expects layers {list(layout.layers_of_stage(pp_rank))}, "
            f"Megatron built {list(layers)}"
        )
