"""Data of the GPT task: the datasets Megatron's flags ask for, and the micro-batch of a rank.

The wheel of Megatron-core ships neither. Used by `host.gpt` and handed to Megatron by `host.pretrain`; must not know
the plugin's stages: it asks the model's own config where layers are, so that it stays right after layers have moved.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core import utils as core_utils
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.training import get_args
from megatron.training import utils as training_utils
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig

from megatron_dyn.host.compat import call_supported

BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
"""Names of the tensors of a batch: int64 [micro_batch, sequence]; loss_mask is float32, attention_mask bool and 4-d."""

_SAME_NAME_OPTIONS = (
    "multiple_validation_sets",
    "full_validation",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "object_storage_cache_path",
    "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens",
    "context_parallel_size",
    "data_parallel_size",
)
"""Fields of the dataset configuration that have the name of the flag they come from."""


def train_valid_test_datasets(num_samples: tuple[int, int, int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the datasets of the three splits; Megatron calls it on every rank, once per model chunk.

    `num_samples` holds the number of samples wanted of each split. A rank that feeds nothing to the model gets None for
    each.
    """
    args = get_args()
    kind = MockGPTDataset if args.mock_data else GPTFIMDataset if args.fim_data else GPTDataset
    transformer_config = core_transformer_config_from_args(args)

    def is_built_here() -> bool:
        return mpu.get_tensor_model_parallel_rank() == 0 and needs_batch(transformer_config, vp_stage)

    builder = BlendedMegatronDatasetBuilder(kind, num_samples, is_built_here, dataset_config(args))
    train, valid, test = builder.build()
    return train, valid, test


# Megatron then calls it on all ranks, not only on the first of each tensor-parallel group.
train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Return the dataset configuration that Megatron's flags ask for."""
    blend, blend_per_split = training_utils.get_blend_and_blend_per_split(args)
    sequences = None
    if args.per_dataset_sequences_path is not None:
        with open(args.per_dataset_sequences_path, encoding="utf-8") as file:
            sequences = json.load(file)
    options: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "tokenizer": build_tokenizer(args),
        "blend": blend,
        "blend_per_split": blend_per_split,
        "split": args.split,
        "sequences_per_dataset": sequences,
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequence_parallel_size": args.tensor_model_parallel_size if args.sequence_parallel else 0,
        **{name: getattr(args, name) for name in _SAME_NAME_OPTIONS},
    }
    return GPTFIMDatasetConfig(**options, **_fim_options(args)) if args.fim_data else GPTDatasetConfig(**options)


def has_mtp(config: Any, vp_stage: int | None) -> bool:
    """Return whether this model chunk holds a layer of multi-token prediction.

    `config` is the transformer config of the model as it is laid out now.
    """
    return bool(
        call_supported(
            mtp_on_this_rank,
            config=config,
            layout=config.pipeline_model_parallel_layout,
            mtp_num_layers=config.mtp_num_layers,
            ignore_virtual=False,
            vp_stage=vp_stage,
        )
    )


def needs_batch(config: Any, vp_stage: int | None) -> bool:
    """Return whether this model chunk reads data: for the embedding, the loss or a layer of multi-token prediction."""
    return training_utils.is_first_or_last_pipeline_stage(vp_stage) or has_mtp(config, vp_stage)


def get_batch(iterator: Iterator[dict[str, torch.Tensor]], config: Any, vp_stage: int | None) -> dict[str, Any]:
    """Return the micro-batch of this rank by the names of `BATCH_KEYS`; None for what this model chunk does not read.

    All ranks of a tensor-parallel group must call it together: the first of them reads and broadcasts.
    """
    if not needs_batch(config, vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    args = get_args()
    if not hasattr(core_utils, "get_batch_on_this_tp_rank"):
        # megatron-core 0.17: the function lives elsewhere, reads the iterator itself and knows its groups.
        batch = training_utils.get_batch_on_this_tp_rank(iterator, mtp_on_this_rank=has_mtp(config, vp_stage))
    else:
        batch = call_supported(
            core_utils.get_batch_on_this_tp_rank,
            _read(iterator) if mpu.get_tensor_model_parallel_rank() == 0 else {},
            # Packed sequences have one name in 0.18 and another in 0.19.
            is_sft=False,
            has_cu_seqlens=False,
            is_hybrid_cp=False,
            create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
            broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
            broadcast_group=mpu.get_tensor_model_parallel_group(),
            cp_size=args.context_parallel_size,
            tp_rank=mpu.get_tensor_model_parallel_rank(),
            micro_batch_size=args.micro_batch_size,
            seq_length=args.seq_length,
            mtp_on_this_rank=has_mtp(config, vp_stage),
            pipeline_model_parallel_size=args.pipeline_model_parallel_size,
            is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
            is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
        )
    on_this_rank = {key: batch[key] for key in BATCH_KEYS}
    context_group = mpu.get_context_parallel_group()
    part = core_utils.get_batch_on_this_cp_rank
    return dict(call_supported(part, on_this_rank, is_hybrid_cp=False, cp_group=context_group))


def _read(iterator: Iterator[dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Take the next micro-batch and put it on the device."""
    sample = next(iterator)
    present = {key: sample[key] for key in BATCH_KEYS if sample.get(key) is not None}
    return dict.fromkeys(BATCH_KEYS) | {key: value.cuda(non_blocking=True) for key, value in present.items()}


def _fim_options(args: Namespace) -> dict[str, Any]:
    special = ("prefix", "middle", "suffix", "pad", "eod")
    names = ("fim_rate", "fim_spm_rate", "fim_split_sample", "fim_fragment_rate", "fim_no_prefix")
    tokens = {name: getattr(args, f"fim_{name}_token") for name in special}
    return {"fim_extra_tokens": tokens, **{name: getattr(args, name) for name in names}}
