"""Bytes of the pieces on this rank: state from the tensors themselves, activations from the last weighing."""

from collections.abc import Iterable, Mapping

import torch

from megatron_dyn.host.editors import Editor
from megatron_dyn.host.optimizer import ParameterState
from megatron_dyn.host.stage import StageModel
from megatron_dyn.measure import Footprint, Kind, Slot
from megatron_dyn.records import Cost


def footprint(stage: StageModel, editor: Editor, activations: Mapping[Slot, int]) -> Footprint:
    """What every layer and both ends hold on this rank; times are zero."""
    layers = stage.layers
    states = editor.states()
    in_layers = {parameter for module in layers.values() for parameter in module.parameters()}
    ends = [parameter for parameter in stage.parameters() if parameter not in in_layers]
    shared = [parameter for parameter in ends if stage.has_embedding]
    return Footprint(
        layers={
            layer: _cost(module.parameters(), module.buffers(), states, _saved(activations, Kind.LAYER, layer))
            for layer, module in layers.items()
        },
        embedding=_cost(shared, (), states, _saved(activations, Kind.EMBEDDING)),
        head=_cost([] if shared else ends, (), states, _saved(activations, Kind.HEAD)),
    )


def _saved(activations: Mapping[Slot, int], kind: Kind, layer: int = -1) -> int:
    return sum(activations.get(Slot(kind, layer, side), 0) for side in (False, True))


def _cost(
    parameters: Iterable[torch.Tensor],
    buffers: Iterable[torch.Tensor],
    states: Mapping[torch.Tensor, ParameterState],
    activation_bytes: int,
) -> Cost:
    moved, gradients = sum(_num_bytes(buffer) for buffer in buffers), 0
    for parameter in parameters:
        moved += _num_bytes(parameter)
        gradients += _num_bytes(getattr(parameter, "main_grad", None))
        state = states.get(parameter)
        if state is None:
            continue
        moved += _num_bytes(state.main) + sum(_num_bytes(tensor) for tensor in state.tensors.values())
    return Cost(state_bytes=moved + gradients, activation_bytes=activation_bytes, moved_bytes=moved)


def _num_bytes(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()
