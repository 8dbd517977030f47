"""One decoder layer of Megatron's as a LayerState, and back: the only place that knows what a layer's whole state is."""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_dyn.host.optimizer import Membership, ParameterState, is_expert
from megatron_dyn.host.parking import PARKED, parked_child
from megatron_dyn.migrate import CodecError, Key, LayerState

_EXTRA_SUFFIX = "_extra_state"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainable:
    """What travels with a trainable parameter besides tensors."""

    expert: bool
    """Whether it belongs to one expert-parallel rank alone (Megatron's `allreduce` attribute says the opposite)."""
    membership: Membership | None = None
    """None where the optimizer's state is sharded and travels by itself."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    group_step: Any = None


def export_layer(
    layer: int, module: torch.nn.Module, states: Mapping[torch.Tensor, ParameterState] | None, device: torch.device
) -> LayerState:
    """The live state of a layer: nothing is copied yet.

    `states` are those of its trainable parameters, None where they are sharded. KeyError when one is missing.
    """
    tensors: dict[Key, torch.Tensor] = {}
    scalars: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        tensors[Key("parameter", name)] = parameter.detach()
        if not parameter.requires_grad:
            continue
        if states is None:
            scalars[name] = Trainable(expert=is_expert(parameter))
            continue
        state = states[parameter]
        scalars[name] = Trainable(
            expert=is_expert(parameter),
            membership=state.membership,
            numbers=dict(state.numbers),
            group_step=state.group_step,
        )
        if state.main is not None:
            tensors[Key("main", name)] = state.main.detach()
        tensors |= {Key(f"optimizer:{moment}", name): value for moment, value in state.tensors.items()}
    tensors |= {Key("buffer", name): buffer.to(device) for name, buffer in module.named_buffers()}
    tensors |= {Key("extra", name): value for name, value in _extra_states(module, device).items()}
    return LayerState(layer=layer, tensors=tensors, scalars=scalars)


def load_layer(module: torch.nn.Module, state: LayerState) -> dict[torch.Tensor, ParameterState]:
    """Make a staged state the content of a fresh module, without a copy; returns the optimizer's share, if it has one.

    Every tensor of the module must be in the state and every tensor of the state must be used, or CodecError is raised:
    half a layer is worse than none.
    """
    left = dict(state.tensors)
    optimizer: dict[torch.Tensor, ParameterState] = {}
    for name, parameter in module.named_parameters():
        _adopt(left, state.layer, Key("parameter", name), parameter)
        trainable: Trainable | None = state.scalars.get(name)
        parameter.requires_grad_(trainable is not None)
        if trainable is None:
            continue
        if trainable.expert != is_expert(parameter):
            told = f"expert {trainable.expert} there, {is_expert(parameter)} here"
            raise CodecError(f"layer {state.layer}: parameter {name}: {told}")
        if trainable.membership is not None:
            optimizer[parameter] = _optimizer_state(left, state.layer, name, parameter, trainable)
    parked = {key.name for key in left if key.kind == "buffer" and key.name.startswith(f"{PARKED}.")}
    if parked:
        parked_child(module, {name: left.pop(Key("buffer", name)) for name in sorted(parked)})
    for name, buffer in module.named_buffers():
        if name in parked:
            continue
        # Megatron keeps some buffers in fp32 whatever the model is in, but converts them only as it trains.
        _adopt(left, state.layer, Key("buffer", name), buffer, any_dtype=True)
    extra = {key.name: left.pop(key) for key in list(left) if key.kind == "extra"}
    if unknown := sorted(extra.keys() - module.state_dict().keys()):
        raise CodecError(f"layer {state.layer}: extra state that the module has no place for: {unknown}")
    _load_extra_states(module, extra)
    if left:
        raise CodecError(f"layer {state.layer}: state that the module has no place for: {sorted(map(str, left))}")
    return optimizer


def _adopt(left: dict[Key, torch.Tensor], layer: int, key: Key, target: torch.Tensor, *, any_dtype: bool = False) -> None:
    value = left.pop(key, None)
    if value is None or value.shape != target.shape or (value.dtype != target.dtype and not any_dtype):
        got = "nothing" if value is None else f"{list(value.shape)} {value.dtype}"
        expected = f"{list(target.shape)} {target.dtype}"
        raise CodecError(f"layer {layer}: {key.kind} {key.name}: expected {expected}, got {got}")
    target.data = value


def _optimizer_state(
    left: dict[Key, torch.Tensor], layer: int, name: str, parameter: torch.Tensor, trainable: Trainable
) -> ParameterState:
    moments = [key for key in left if key.kind.startswith("optimizer:") and key.name == name]
    main = left.pop(Key("main", name), None)
    if (main is None) != (parameter.dtype == torch.float32) or (main is not None and main.shape != parameter.shape):
        # Without its fp32 copy a half-precision parameter would be optimised in half precision, silently.
        got = "nothing" if main is None else list(main.shape)
        raise CodecError(f"layer {layer}: main {name} of a {parameter.dtype} parameter: got {got}")
    assert trainable.membership is not None
    return ParameterState(
        membership=trainable.membership,
        main=main,
        tensors={key.kind.partition(":")[2]: left.pop(key) for key in moments},
        numbers=trainable.numbers,
        group_step=trainable.group_step,
    )


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
