"""What the entry needs on megatron-core 0.17 and 0.18, which build a GPT from a function; 0.17 parses in `pretrain()`.

Called by `compat` alone, on those releases alone; goes when they leave the supported range.
"""

from __future__ import annotations

import functools
import inspect
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.transformer.spec_utils import import_module
from megatron.training import arguments, checkpointing, get_args, global_vars, training

from megatron_dyn.host.compat import call_supported
from megatron_dyn.host.seams import Seam, apply


def parse_arguments(extra_args_provider: Callable[[Any], Any], defaults: Mapping[str, Any]) -> Namespace:
    """Parse, validate and publish `sys.argv` as 0.17 does inside of `initialize_megatron`, but before it."""
    args: Namespace = arguments.parse_args(extra_args_provider)
    if args.use_checkpoint_args:
        checkpointing.load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        checkpointing.load_args_from_checkpoint(args)
    arguments.validate_args(args, dict(defaults))
    global_vars.set_global_variables(args)
    return args


def parsed_already(args: Namespace) -> AbstractContextManager[Any]:
    """Let `initialize_megatron` take `args` as they are while the block runs; 0.18 does not parse there anyway."""
    if "parsed_args" not in inspect.signature(training.initialize_megatron).parameters:
        return apply([])

    def with_args(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def initialize_megatron(*positional: Any, **options: Any) -> Any:
            return original(*positional, **{**options, "parsed_args": args})

        return initialize_megatron

    why = "megatron-core 0.17 parses inside of pretrain(), after the plugin had to know the arguments"
    until = "0.17 leaves the supported range"
    skipped = ("megatron.training.initialize:validate_args", "megatron.training.initialize:set_global_variables")
    skip = [Seam(target=target, why=why, remove_when=until, wrap=lambda _original: _do_nothing()) for target in skipped]
    target = "megatron.training.training:initialize_megatron"
    return apply([Seam(target=target, why=why, remove_when=until, wrap=with_args), *skip])


def gpt_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """Build one chunk of the GPT that Megatron's flags describe; `get_model` calls it on every rank, once per chunk."""
    args = get_args()
    if config is None:
        config = arguments.core_transformer_config_from_args(args)
    spec = _layer_spec(args, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        mtp_block_spec=_mtp_spec(args, config, spec, vp_stage),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def _layer_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return the spec of the layers: the user's, that of a block which mixes kinds of layers, or one spec for all."""
    if args.spec is not None:
        spec = import_module(args.spec)
        return call_supported(spec, config, vp_stage=vp_stage) if callable(spec) else spec
    engine = args.transformer_impl == "transformer_engine"
    if args.num_experts is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=engine,
            normalization=args.normalization,
            qk_l2_norm=args.qk_l2_norm,
            vp_stage=vp_stage,
        )
    layer_spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec if engine else gpt_layer_specs.get_gpt_layer_local_spec
    )
    return call_supported(
        layer_spec,
        qk_layernorm=args.qk_layernorm,
        multi_latent_attention=args.multi_latent_attention,
        normalization=args.normalization,
        qk_l2_norm=args.qk_l2_norm,
    )


def _mtp_spec(args: Namespace, config: Any, spec: Any, vp_stage: int | None) -> Any:
    if args.mtp_num_layers is None:
        return None
    # A block spec describes each layer of the stage; those of MTP look like its last.
    layer = spec.layer_specs[-1] if getattr(spec, "layer_specs", None) else spec
    engine = args.transformer_impl == "transformer_engine"
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, layer, use_transformer_engine=engine, vp_stage=vp_stage)


def _do_nothing() -> Callable[..., None]:
    return lambda *_args, **_options: None


@dataclass(frozen=True, slots=True)
class BufferKind:
    """Which parameters share a buffer."""

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert_parallel: bool


def full_param_layout(
    params: list[torch.Tensor],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: Any,
    expert_data_parallel_world_size: int,
) -> Any:
    """What `DistributedOptimizer.compute_full_param_layout` of 0.18 answers, for 0.17, where buffers lay themselves out.

    Source: 0.17's _ParamAndGradBuffer.__init__: parameters from last to first, each at a multiple of 64 elements, buckets that
    end at a multiple of what the data-parallel ranks can share. A layout that is not what Megatron then makes is noticed
    at the commit (`host.shards`), where the job would end.
    """
    groups: dict[BufferKind, list[torch.Tensor]] = {}
    for parameter in params:
        grad_dtype = torch.float32 if ddp_config.grad_reduce_in_fp32 else parameter.dtype
        kind = BufferKind(parameter.dtype, grad_dtype, not getattr(parameter, "allreduce", True))
        groups.setdefault(kind, []).append(parameter)
    layouts = {}
    for kind, members in groups.items():
        ranks = expert_data_parallel_world_size if kind.is_expert_parallel else data_parallel_world_size
        shared = [ranks, 128, *([2**16] if ddp_config.pad_buckets_for_high_nccl_busbw else [])]
        layouts[kind] = _one_buffer(members, bucket_size, math.lcm(*shared))
    return SimpleNamespace(layouts=layouts)


def _one_buffer(members: list[torch.Tensor], bucket_size: int | None, divisor: int) -> Any:
    index_map: dict[torch.Tensor, tuple[int, int, int]] = {}
    buckets: list[tuple[int, int]] = []
    bucket_start = position = 0

    def close_bucket(end: int) -> int:
        nonlocal bucket_start
        buckets.append((bucket_start, -(-end // divisor) * divisor))
        bucket_start = buckets[-1][1]
        return bucket_start

    for parameter in reversed(members):
        start = -(-position // 64) * 64
        alone = getattr(parameter, "shared_embedding", False)
        if alone and position > bucket_start:
            start = close_bucket(start)
        position = start + parameter.nelement()
        index_map[parameter] = (start, position, len(buckets))
        if alone or (bucket_size is not None and position - bucket_start >= bucket_size):
            position = close_bucket(position)
    if position > bucket_start:
        close_bucket(position)
    return SimpleNamespace(param_index_map=index_map, bucket_indices=buckets)
