"""Which elements of each parameter a rank will own once Megatron has laid out a chunk's buffers for its distributed optimizer.

Megatron's own function computes the layout, from parameters that need not have any storage. So shards can be planned, and
sent, before anything in the model changes.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dyn.host import legacy
from megatron_dyn.host.compat import HostError, describe_host, megatron_version


def takes_layout() -> bool:
    """Whether the installed release computes layouts apart from buffers, and DDP takes one; 0.17 does not.

    Raises HostError where a later release has lost the function: its buffers would be guessed at.
    """
    if hasattr(DistributedOptimizer, "compute_full_param_layout"):
        return True
    if not megatron_version().startswith("0.17."):
        raise HostError(f"DistributedOptimizer.compute_full_param_layout does not exist; {describe_host()}")
    return False


def buffer_layout(ddp: Any, parameters: Iterable[torch.Tensor], *, bucketed: bool) -> Any:
    """Megatron's `FullParamLayout` of a chunk with these trainable parameters, in the model's order.

    Shapes, dtypes and attributes count, data is not read. Source: megatron/core/optimizer/distrib_optimizer.py.
    """
    compute = DistributedOptimizer.compute_full_param_layout if takes_layout() else legacy.full_param_layout
    return compute(
        list(parameters),
        # As in training.get_model: stages after the first have nothing to overlap, and so one bucket.
        ddp.ddp_config.bucket_size if bucketed and ddp.pp_group.rank() == 0 else None,
        ddp.intra_dp_cp_group.size(),
        ddp.ddp_config,
        expert_data_parallel_world_size=ddp.intra_expt_dp_group.size(),
    )


def owned_ranges(ddp: Any, layout: Any) -> dict[torch.Tensor, tuple[int, int]]:
    """(start, end) of the flat parameter that this rank owns under `layout`, where it owns anything of it."""
    owned: dict[torch.Tensor, tuple[int, int]] = {}
    for key, buffer in layout.layouts.items():
        group: dist.ProcessGroup = ddp.intra_expt_dp_group if key.is_expert_parallel else ddp.intra_dp_cp_group
        for parameter, (start, end, bucket) in buffer.param_index_map.items():
            low, high = _share(buffer.bucket_indices[bucket], group)
            first, last = max(start, low), min(end, high)
            if first < last:
                owned[parameter] = (first - start, last - start)
    return owned


def _share(bucket: tuple[int, int], group: dist.ProcessGroup) -> tuple[int, int]:
    """The part of a bucket that this rank owns: buckets are padded so that they divide."""
    start, end = bucket
    size = (end - start) // group.size()
    return start + group.rank() * size, start + (group.rank() + 1) * size
