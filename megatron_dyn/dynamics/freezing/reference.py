"""Egeria's reference: a quantised copy of a layer, in host memory, and how far the layer has moved from what it says.

The copy is carried on the layer (int8 with a scale a row), so that it moves and is saved with it. The reference is run through
the layer's own module with the copied weights put in its place for one call, without dropout and without gradients.
"""

from typing import Any

import torch
from torch.func import functional_call

from megatron_dyn.host.carried import Carried, cut_of

REFERENCE = "dyn_reference"
"""Name of the child module."""
_MAX_ROWS = 256
"""Tokens that are compared: the similarity of all pairs of them is what is looked at."""


def attach_reference(module: torch.nn.Module) -> None:
    """Let a layer carry a reference; `copy_reference` fills it."""
    carried = Carried(on_cpu=True)
    for name, parameter in module.named_parameters():
        rows = parameter.shape[0]
        carried.put(f"quantised:{name}", torch.zeros(parameter.shape, dtype=torch.int8), cut_of(parameter))
        carried.put(f"scale:{name}", torch.zeros(rows, dtype=torch.float32), cut_of(parameter))
    module.add_module(REFERENCE, carried)


@torch.no_grad()
def copy_reference(module: torch.nn.Module) -> None:
    """Make the layer's weights of now its reference."""
    carried: Any = getattr(module, REFERENCE)
    for name, parameter in module.named_parameters():
        weight = parameter.detach().float()
        flat = weight.reshape(weight.shape[0], -1)
        scale = flat.abs().amax(dim=1) / 127
        quantised = torch.round(flat / scale.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)).to(torch.int8)
        carried.get(f"quantised:{name}").copy_(quantised.view(parameter.shape))
        carried.get(f"scale:{name}").copy_(scale)


@torch.no_grad()
def plasticity(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """How differently a layer and its reference see the tokens of one micro-batch; 0: alike.

    Both are run on the same input in evaluation mode, so that no random number is drawn. The layers before are frozen, so
    their part of the reference would give the same input.
    """
    carried: Any = getattr(module, REFERENCE)
    weights = {
        name: _dequantised(carried.get(f"quantised:{name}"), carried.get(f"scale:{name}"), parameter)
        for name, parameter in module.named_parameters()
    }
    training = module.training
    module.eval()
    try:
        ours = _hidden(functional_call(module, {}, args, kwargs))
        theirs = _hidden(functional_call(module, weights, args, kwargs))
    finally:
        module.train(training)
    return similarity_distance(ours, theirs)


def similarity_distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Mean squared difference of the similarity matrices of tokens; activations are [..., hidden].

    Tung and Mori, "Similarity-Preserving Knowledge Distillation", ICCV 2019, equations 2 to 4, with tokens as the batch.
    """
    matrices = []
    for activations in (ours, theirs):
        rows = activations.reshape(-1, activations.shape[-1])[:_MAX_ROWS].double()
        matrices.append(torch.nn.functional.normalize(rows @ rows.T, dim=1))
    return float((matrices[0] - matrices[1]).square().mean())


def _dequantised(quantised: torch.Tensor, scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    shape = (-1, *([1] * (quantised.dim() - 1)))
    return (quantised.float() * scale.view(shape)).to(device=like.device, dtype=like.dtype)


def _hidden(output: Any) -> torch.Tensor:
    hidden: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden
