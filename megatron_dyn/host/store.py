"""Megatron's side of a move: exports a layer with its whole state, and is the LayerStore that the rebuild drives."""

import io
from collections.abc import Sequence
from typing import Any

import torch

from megatron_dyn.host.layout import publish
from megatron_dyn.host.optimizer import OptimizerEditor, ParameterState
from megatron_dyn.host.stage import StageModel
from megatron_dyn.migrate import CodecError, Key, LayerState
from megatron_dyn.records import Layout

_EXTRA_SUFFIX = "_extra_state"


class MegatronLayerStore:
    """One per rank. Implements ports.LayerStore on the job's own model and optimizer objects."""

    def __init__(self, stage: StageModel, optimizer: OptimizerEditor, args: Any) -> None:
        """`args` are Megatron's global arguments, whose layout follows every move."""
        self._stage = stage
        self._optimizer = optimizer
        self._args = args
        self._prepared: dict[int, tuple[torch.nn.Module, dict[torch.Tensor, ParameterState]]] = {}
        self._removed: list[torch.Tensor] = []

    def export(self, layer: int) -> LayerState:
        """The live state of local layer `layer`: nothing is copied yet. KeyError when it is not here."""
        module = self._stage.layers[layer]
        tensors: dict[Key, torch.Tensor] = {}
        scalars: dict[str, Any] = {}
        states = self._optimizer.export(parameter for parameter in module.parameters() if parameter.requires_grad)
        for name, parameter in module.named_parameters():
            tensors[Key("parameter", name)] = parameter.detach()
            if parameter.requires_grad:
                state = states[parameter]
                scalars[name] = (state.membership, dict(state.numbers), state.group_step)
                if state.main is not None:
                    tensors[Key("main", name)] = state.main.detach()
                for moment, value in state.tensors.items():
                    tensors[Key(f"optimizer:{moment}", name)] = value
        tensors |= {Key("buffer", name): buffer for name, buffer in module.named_buffers()}
        tensors |= {Key("extra", name): value for name, value in _extra_states(module, self._stage.device).items()}
        return LayerState(layer=layer, tensors=tensors, scalars=scalars)

    def prepare(self, staged: dict[int, LayerState]) -> None:
        """See ports.LayerStore. The staged tensors become the layer's own. Raises CodecError on a misfit."""
        for layer in list(staged):
            module = self._stage.build(layer)
            state = staged.pop(layer)
            self._prepared[layer] = (module, _load(module, state))

    def discard(self) -> None:
        """See ports.LayerStore."""
        self._prepared.clear()

    def detach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore."""
        if not layers and not self._prepared:
            return
        self._stage.release_gradients()
        gone = [self._stage.layers[layer] for layer in layers]
        self._removed = [parameter for module in gone for parameter in module.parameters() if parameter.requires_grad]
        self._stage.replace(removed=layers, added={})

    def attach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore."""
        if not layers and not self._removed:
            return
        self._stage.replace(removed=(), added={layer: self._prepared[layer][0] for layer in layers})
        added: dict[torch.Tensor, ParameterState] = {}
        for layer in layers:
            added |= self._prepared[layer][1]
        self._optimizer.edit(removed=self._removed, added=added, order=self._stage.ddp.parameters())
        self._removed = []
        self._prepared.clear()

    def publish(self, layout: Layout) -> None:
        """See ports.LayerStore."""
        publish(self._stage.config, self._args, layout)

    def rewrap(self) -> None:
        """See ports.LayerStore."""
        self._stage.rewrap()


def _load(module: torch.nn.Module, state: LayerState) -> dict[torch.Tensor, ParameterState]:
    """Make a staged state the content of a fresh module, without a copy; returns the optimizer's share.

    Every tensor of the module must be in the state and every tensor of the state must be used, or CodecError is raised:
    half a layer is worse than none.
    """
    left = dict(state.tensors)

    def adopt(kind: str, name: str, target: torch.Tensor) -> None:
        value = left.pop(Key(kind, name), None)
        if value is None or (value.shape, value.dtype) != (target.shape, target.dtype):
            got = "nothing" if value is None else f"{list(value.shape)} {value.dtype}"
            expected = f"{list(target.shape)} {target.dtype}"
            raise CodecError(f"layer {state.layer}: {kind} {name}: expected {expected}, got {got}")
        target.data = value

    optimizer: dict[torch.Tensor, ParameterState] = {}
    for name, parameter in module.named_parameters():
        adopt("parameter", name, parameter)
        parameter.requires_grad_(name in state.scalars)
        if name in state.scalars:
            membership, numbers, group_step = state.scalars[name]
            moments = [key for key in left if key.kind.startswith("optimizer:") and key.name == name]
            main = left.pop(Key("main", name), None)
            if (main is None) != (parameter.dtype == torch.float32) or (main is not None and main.shape != parameter.shape):
                # Without its fp32 copy a half-precision parameter would be optimised in half precision, silently.
                got = "nothing" if main is None else list(main.shape)
                raise CodecError(f"layer {state.layer}: main {name} of a {parameter.dtype} parameter: got {got}")
            optimizer[parameter] = ParameterState(
                membership=membership,
                main=main,
                tensors={key.kind.partition(":")[2]: left.pop(key) for key in moments},
                numbers=numbers,
                group_step=group_step,
            )
    for name, buffer in module.named_buffers():
        adopt("buffer", name, buffer)
    extra = {key.name: left.pop(key) for key in list(left) if key.kind == "extra"}
    if unknown := sorted(extra.keys() - module.state_dict().keys()):
        raise CodecError(f"layer {state.layer}: extra state that the module has no place for: {unknown}")
    _load_extra_states(module, extra)
    if left:
        raise CodecError(f"layer {state.layer}: state that the module has no place for: {sorted(map(str, left))}")
    return optimizer


def _extra_states(module: torch.nn.Module, device: torch.device) -> dict[str, torch.Tensor]:
    """Extra state of every submodule that has any (fp8 scales, for example), as byte tensors on `device`."""
    extra = {}
    for name, value in module.state_dict().items():
        if name.endswith(_EXTRA_SUFFIX) and value is not None:
            stream = io.BytesIO()
            torch.save(value.getvalue() if isinstance(value, io.BytesIO) else value, stream)
            extra[name] = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(device)
    return extra


def _load_extra_states(module: torch.nn.Module, extra: dict[str, torch.Tensor]) -> None:
    for name, value in extra.items():
        owner = module.get_submodule(name.removesuffix(_EXTRA_SUFFIX).rstrip("."))
        # Written by a peer rank of this very job a moment ago, so its pickle is as trusted as the job itself.
        content = torch.load(io.BytesIO(value.cpu().numpy().tobytes()), weights_only=False, map_location="cpu")
        owner.set_extra_state(io.BytesIO(content) if isinstance(content, bytes) else content)
