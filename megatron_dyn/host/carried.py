"""What a layer carries besides its parameters (masks, parked moments, a reference copy), moved and saved with the layer.

A child module of the layer. `host.layer_state` moves every buffer of a layer; here is how they enter Megatron's distributed
checkpoints, which need to know over which ranks a buffer is cut.
"""

from enum import StrEnum
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor

from megatron_dyn.host.optimizer import is_expert


class Cut(StrEnum):
    """Over which ranks the copies of a carried tensor differ."""

    NONE = "none"
    """All ranks that hold the layer carry the same."""
    TENSOR = "tensor"
    """Each tensor-parallel rank carries its own."""
    EXPERT = "expert"
    """Each expert-parallel and expert-tensor-parallel rank carries its own."""


def cut_of(parameter: torch.Tensor) -> Cut:
    """How something of a parameter's shape is cut: as the parameter is."""
    if is_expert(parameter):
        return Cut.EXPERT
    return Cut.TENSOR if getattr(parameter, "tensor_model_parallel", False) else Cut.NONE


class Carried(torch.nn.Module):
    """Named tensors of one layer. Add it to the layer as a submodule, in `Dynamic.attach`.

    A name may hold dots (that of a parameter, say). What differs from rank to rank has a key of its own in a checkpoint, so it
    loads only at the same tensor- and expert-parallel sizes.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        """Carry nothing yet. `on_cpu`: what is carried stays in host memory and in its precision, wherever the model goes."""
        super().__init__()
        self._on_cpu = on_cpu
        self._cuts: dict[str, Cut] = {}
        self.saved = True
        """Whether checkpoints know of it: False while one is loaded that was written without it."""

    def put(self, name: str, tensor: torch.Tensor, cut: Cut) -> None:
        """Carry `tensor` under `name`, in place of what was there."""
        key = name.replace(".", "/")
        self._cuts[key] = cut
        self.register_buffer(key, tensor)

    def drop(self, name: str) -> None:
        """Carry `name` no longer. KeyError when it was not carried."""
        key = name.replace(".", "/")
        del self._cuts[key]
        delattr(self, key)

    def get(self, name: str) -> torch.Tensor | None:
        """What is carried under `name`."""
        return self._buffers.get(name.replace(".", "/"))

    def names(self) -> list[str]:
        """What is carried, in the order in which it was put."""
        return [key.replace("/", ".") for key in self._buffers]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See Megatron's MegatronModule. Raises ValueError where layers are stacked: each carries what it carries."""
        if not self.saved:
            return {}
        if sharded_offsets:
            raise ValueError(f"{prefix}: expected layers under names of their own, got offsets {sharded_offsets}")
        return {f"{prefix}{key}": _sharded(f"{prefix}{key}", tensor, self._cuts[key]) for key, tensor in self._buffers.items()}

    def _apply(self, fn: Any, recurse: bool = True) -> "Carried":
        # Through here pass .to(), .cuda(), .bfloat16() and the like.
        return self if self._on_cpu else super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        if not self.saved:
            # A checkpoint without it is complete all the same.
            state_dict.update({f"{prefix}{key}": tensor for key, tensor in self._buffers.items()})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _sharded(key: str, tensor: torch.Tensor, cut: Cut) -> ShardedTensor:
    data_rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    if cut is Cut.NONE:
        return ShardedTensor.from_rank_offsets(key, tensor, replica_id=(0, tensor_rank, data_rank))
    if cut is Cut.TENSOR:
        name = f"{key}.tp{tensor_rank}of{parallel_state.get_tensor_model_parallel_world_size()}"
        return ShardedTensor.from_rank_offsets(name, tensor, replica_id=(0, 0, data_rank))
    place = (
        f"ep{parallel_state.get_expert_model_parallel_rank()}of{parallel_state.get_expert_model_parallel_world_size()}"
        f".etp{parallel_state.get_expert_tensor_parallel_rank()}of{parallel_state.get_expert_tensor_parallel_world_size()}"
    )
    return ShardedTensor.from_rank_offsets(
        f"{key}.{place}", tensor, replica_id=(0, 0, parallel_state.get_expert_data_parallel_rank())
    )
