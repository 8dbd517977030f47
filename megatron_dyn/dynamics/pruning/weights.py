"""Which parameters of a decoder layer take part, and how they are known over all ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from megatron_dyn.dynamics.pruning.threshold import Key
from megatron_dyn.host.carried import Cut, cut_of

MASKS = "dyn_prune"
"""The child module of a decoder layer that carries its masks, by the name of the parameter."""


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """One weight that may be pruned, on this rank, with its mask. Equal to itself alone: tensors do not compare."""

    layer: int
    name: str
    """Of the parameter within its layer."""
    parameter: torch.nn.Parameter
    mask: torch.Tensor
    """bool, the parameter's shape, live."""

    @property
    def key(self) -> Key:
        """See threshold.Key."""
        return (self.layer, self.name, place_of(self.parameter))


def prunable(module: torch.nn.Module, exclude: Sequence[str]) -> dict[str, torch.nn.Parameter]:
    """The weights of a decoder layer's linear layers by name, in order, without those whose names hold an excluded part.

    Norms, biases and routers are none of them; Megatron calls all its linear layers `linear_...`.
    """
    found = {}
    for name, parameter in module.named_parameters():
        *parts, last = name.split(".")
        # Transformer Engine numbers the weights of grouped experts.
        is_weight = last.startswith("weight") and parameter.dim() == 2 and parts[-1:] and parts[-1].startswith("linear_")
        if is_weight and not set(parts) & set(exclude):
            found[name] = parameter
    return found


def place_of(parameter: torch.Tensor) -> tuple[int, int]:
    """(expert-parallel rank, tensor-parallel rank) that tell apart the slices of a parameter; 0 where it is not cut."""
    match cut_of(parameter):
        case Cut.NONE:
            return (0, 0)
        case Cut.TENSOR:
            return (0, parallel_state.get_tensor_model_parallel_rank())
        case Cut.EXPERT:
            return (
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_tensor_parallel_rank(),
            )
