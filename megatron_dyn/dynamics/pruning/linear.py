"""Megatron's own parallel linear layers, with another product inside where a weight is sparse; and the specs that ask for them.

Only the product is ours: what goes to and comes from other tensor-parallel ranks passes through Megatron's own functions.
"""

import copy
import functools
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_dyn.dynamics.pruning.sparse_weight import SparseWeight


class PrunableLinear:
    """Put before one of Megatron's linear layers: takes over its product while `sparse` is set."""

    sparse: SparseWeight | None = None

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        if self.sparse is None or args or not _can_take_over(options):
            return super()._forward_impl(input, weight, *args, **options)
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=options.get("tp_group"))
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=options.get("tp_group"))
        product = self.sparse.linear(input, weight)
        return product if options.get("bias") is None else product + options["bias"]


class PrunableColumnParallelLinear(PrunableLinear, ColumnParallelLinear):
    """See PrunableLinear."""


class PrunableRowParallelLinear(PrunableLinear, RowParallelLinear):
    """See PrunableLinear."""


_INSTEAD = {ColumnParallelLinear: PrunableColumnParallelLinear, RowParallelLinear: PrunableRowParallelLinear}


def _can_take_over(options: Mapping[str, Any]) -> bool:
    """Whether Megatron asks for nothing but a product: no fused accumulation, no deferred or sharded weight gradient."""
    return (
        not options["gradient_accumulation_fusion"]
        and options.get("grad_output_buffer") is None
        and options.get("gtp_remat_size", 1) == 1
    )


def with_prunable_linears(spec: Any) -> Any:
    """A copy of a module spec in which every linear layer of Megatron's own is one of ours; other classes stay."""
    if isinstance(spec, type):
        return _INSTEAD.get(spec, spec)
    if isinstance(spec, functools.partial):
        given = {name: with_prunable_linears(value) for name, value in spec.keywords.items()}
        return functools.partial(with_prunable_linears(spec.func), *map(with_prunable_linears, spec.args), **given)
    if isinstance(spec, dict):
        return {name: with_prunable_linears(value) for name, value in spec.items()}
    if is_dataclass(spec):
        edited = copy.copy(spec)
        for field in fields(spec):
            # Not all of them can be set the plain way: some are frozen.
            object.__setattr__(edited, field.name, with_prunable_linears(getattr(spec, field.name)))
        return edited
    return spec
