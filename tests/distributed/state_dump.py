"""Describes a rank's model and optimizer, bit for bit and whatever the layout, from Megatron's own objects and none of ours.

A mistake in our export cannot hide itself here: nothing of megatron_dyn is called. Parameters go by global names with their
parallel coordinates; what a distributed optimizer spreads over ranks is put together by `merge` before it is compared.
"""

import hashlib
import importlib
from collections.abc import Iterator, Sequence
from typing import Any


def dump_state(model: Sequence[Any], optimizer: Any) -> dict[str, dict[str, Any]]:
    """Everything a parameter is, by global name; states as (first element, bytes) by kind. `model` is Megatron's list."""
    names = dict(_names(model))
    optimised = {}
    for wrapper in getattr(optimizer, "chained_optimizers", [optimizer]):
        optimised |= {id(parameter): entry for parameter, *entry in _optimised(wrapper)}
    state = {}
    for name, parameter in names.items():
        described: dict[str, Any] = {
            "parameter": digest(parameter),
            "requires_grad": parameter.requires_grad,
            "attributes": sorted(key for key in vars(parameter) if not key.startswith(("main_", "grad_added", "__"))),
            "pieces": {},
        }
        if id(parameter) in optimised:
            start, main, moments, group = optimised[id(parameter)]
            tensors = {**moments, **({} if main is None else {"main": main})}
            described["group"] = {key: group[key] for key in ("lr", "weight_decay", "wd_mult", "lr_mult", "is_expert_parallel")}
            for kind, value in tensors.items():
                if getattr(value, "ndim", 0):
                    described["pieces"][kind] = [(start, raw(value))]
                else:
                    described[kind] = float(value)
        state[name] = described
    for name, buffer in _buffers(model):
        state[f"buffer {name}"] = {"parameter": digest(buffer), "pieces": {}}
    return state


def merge(states: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """All ranks' states in one: replicas must agree, and pieces must add up to whole parameters without a gap."""
    merged: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, described in state.items():
            first = merged.setdefault(name, described)
            if first is described:
                continue
            assert first["parameter"] == described["parameter"], f"{name} differs over ranks"
            for kind, pieces in described["pieces"].items():
                first["pieces"].setdefault(kind, []).extend(pieces)
            merged[name] = {**described, **first}
    for name, described in merged.items():
        pieces = described.pop("pieces")
        described["state"] = {kind: _joined(name, pieces[kind]) for kind in sorted(pieces)}
    return merged


def _joined(name: str, pieces: list[tuple[int, bytes]]) -> tuple[int, str]:
    """(number of bytes, digest) of pieces put together; whole copies (no sharding) must agree."""
    whole = b""
    for start, data in sorted(pieces):
        if start == 0 and whole:
            assert data == whole, f"{name}: optimizer state differs over ranks"
            continue
        if start * 4 != len(whole):
            # A copy by another instance of the optimizer: what is there already must be the same.
            assert whole[start * 4 : start * 4 + len(data)] == data, f"{name}: a gap before element {start}"
            continue
        whole += data
    return len(whole), hashlib.sha256(whole).hexdigest()


def _names(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    seen = set()
    for unit, module in _units(model):
        for name, parameter in module.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield f"{unit} {name} {_coordinate(parameter)}", parameter


def _buffers(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for unit, module in _units(model):
        if not unit.startswith("layer"):
            continue
        parameters = dict(module.named_parameters())
        for name, buffer in module.named_buffers():
            # What a layer carries for a parameter (mask, parked moment) goes by its name, and is cut as it is.
            parameter = parameters.get(name.rpartition(".")[2].replace("/", "."))
            yield f"{unit} {name}" + (f" {_coordinate(parameter)}" if "/" in name and parameter is not None else ""), buffer


def _units(model: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Layers first, so that what is left over of a chunk goes by the chunk's place in the pipeline."""
    mpu = importlib.import_module("megatron.core.parallel_state")
    bare = []
    for chunk in model:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        bare.append(chunk)
        for layer in chunk.decoder.layers:
            yield f"layer {layer.layer_number - 1}", layer
    for index, chunk in enumerate(bare):
        yield f"chunk {index} of stage {mpu.get_pipeline_model_parallel_rank()}", chunk


def _coordinate(parameter: Any) -> str:
    mpu = importlib.import_module("megatron.core.parallel_state")
    if getattr(parameter, "allreduce", True):
        return f"tp{mpu.get_tensor_model_parallel_rank()}"
    return f"ep{mpu.get_expert_model_parallel_rank()} etp{mpu.get_expert_tensor_parallel_rank()}"


def _optimised(wrapper: Any) -> Iterator[tuple[Any, int, Any, Any, Any]]:
    """(model parameter, first element of its state here, main parameter, moments, group) of one Megatron optimizer."""
    inner = wrapper.optimizer
    for index, group in enumerate(inner.param_groups if inner is not None else ()):
        if hasattr(wrapper, "shard_fp32_groups"):
            for parameter, main in zip(
                wrapper.model_float16_groups[index], wrapper.shard_fp32_from_float16_groups[index], strict=True
            ):
                yield parameter, wrapper._get_model_param_range_map(parameter)["param"].start, main, inner.state[main], group
            for parameter, shard in zip(wrapper.model_fp32_groups[index], wrapper.shard_fp32_groups[index], strict=True):
                # A shard is a view: parameters that got out of step with it would not be trained any more.
                start = wrapper._get_model_param_range_map(parameter)["param"].start
                assert shard.data_ptr() == parameter.view(-1)[start:].data_ptr(), "shard is no view of its parameter"
                yield parameter, start, None, inner.state[shard], group
        elif hasattr(wrapper, "float16_groups"):
            for parameter, main in zip(wrapper.float16_groups[index], wrapper.fp32_from_float16_groups[index], strict=True):
                yield parameter, 0, main, inner.state[main], group
            for parameter in wrapper.fp32_from_fp32_groups[index]:
                yield parameter, 0, None, inner.state[parameter], group
        else:
            yield from ((parameter, 0, None, inner.state[parameter], group) for parameter in group["params"])


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor."""
    torch = importlib.import_module("torch")
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def digest(tensor: Any) -> str:
    """A digest of the bytes of a tensor, and its shape and type."""
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(raw(tensor)).hexdigest()}"
