"""Edits Megatron's unsharded optimizers in place: takes parameters with their moments out, puts others in, keeps the order.

Works on the torch optimizer inside `FP32Optimizer` and `Float16OptimizerWithFloat16Params`, chained or not. The optimizer
objects stay, because `train()` holds them as locals; parameters that stay keep their very tensors. Source of the list
structure: megatron/core/optimizer/optimizer.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.optimizer import optimizer as host_optimizer
from megatron.core.tensor_parallel import copy_tensor_model_parallel_attributes


@dataclass(frozen=True, slots=True)
class Membership:
    """Which parameter group a parameter belongs to; the numbering is the same on all ranks (Megatron aligns it)."""

    chain: int
    group: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """What the optimizer knows of one parameter."""

    membership: Membership
    main: torch.Tensor | None
    """The fp32 copy that is really optimised; None when the parameter itself is."""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Moments, of the parameter's shape."""
    numbers: Mapping[str, Any] = field(default_factory=dict)
    """The rest: numbers, None, and zero-dimensional tensors (torch Adam's step) as `ScalarTensor`."""
    group_step: Any = None
    """The step kept per group (fused Adam); None when steps are kept per parameter."""


@dataclass(frozen=True, slots=True)
class ScalarTensor:
    """A zero-dimensional tensor as a number: exact, since fp32 fits a Python float; it returns to its own device type."""

    value: float
    dtype: str
    device_type: str

    def materialise(self, like: torch.Tensor) -> torch.Tensor:
        """The tensor again, on the CPU or on the device of `like`."""
        device = torch.device("cpu") if self.device_type == "cpu" else like.device
        return torch.tensor(self.value, dtype=getattr(torch, self.dtype), device=device)


def is_expert(parameter: torch.Tensor) -> bool:
    """Whether the parameter is one of an expert's, with data-parallel groups and buffers of its own."""
    return not getattr(parameter, "allreduce", True)


def numbers_and_tensors(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A torch optimizer's state of one parameter, parted into plain values and live tensors of the parameter's size."""
    numbers, tensors = {}, {}
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            numbers[name] = ScalarTensor(value.item(), str(value.dtype).removeprefix("torch."), value.device.type)
        elif isinstance(value, torch.Tensor):
            tensors[name] = value
        else:
            numbers[name] = value
    return numbers, tensors


def restored_numbers(numbers: Mapping[str, Any], like: torch.Tensor) -> dict[str, Any]:
    """The plain values as the optimizer keeps them; tensors among them go to the CPU or to the device of `like`."""
    return {name: value.materialise(like) if isinstance(value, ScalarTensor) else value for name, value in numbers.items()}


class ListEditor:
    """One per rank, bound to the optimizer of the job."""

    def __init__(self, chain: list[Any]) -> None:
        """`chain` holds every FP32Optimizer or Float16OptimizerWithFloat16Params of the job."""
        self._chain = chain

    def export(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, ParameterState]:
        """The states of local parameters; the tensors are live, so copy before changing any. KeyError if one is unknown."""
        members = self._members()
        return {parameter: self._describe(parameter, *members[parameter]) for parameter in parameters}

    def _describe(self, parameter: torch.Tensor, membership: Membership, main: torch.Tensor | None) -> ParameterState:
        inner = self._chain[membership.chain].optimizer
        numbers, tensors = numbers_and_tensors(inner.state.get(parameter if main is None else main, {}))
        group_step = inner.param_groups[membership.group].get("step")
        return ParameterState(membership=membership, main=main, tensors=tensors, numbers=numbers, group_step=group_step)

    def states(self) -> dict[torch.Tensor, ParameterState]:
        """The states of all local parameters; see `export`."""
        return {parameter: self._describe(parameter, *member) for parameter, member in self._members().items()}

    @torch.no_grad()
    def silence(self, masks: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Clear main parameters and moments of local parameters wherever their mask (bool, same shape) is False."""
        for parameter, state in self.export(parameter for parameter in masks if parameter.requires_grad).items():
            for tensor in (state.main, *state.tensors.values()):
                if tensor is not None:
                    tensor.mul_(masks[parameter])

    def edit(
        self,
        *,
        removed: Iterable[torch.Tensor],
        added: Mapping[torch.Tensor, ParameterState],
        order: Iterable[torch.Tensor],
    ) -> None:
        """Take out `removed`, put in `added`, and list every group in the order of `order` (all parameters of the model).

        Tensors of `added` states become the optimizer's own.
        """
        members = self._members()
        for parameter in removed:
            membership, main = members.pop(parameter)
            self._chain[membership.chain].optimizer.state.pop(parameter if main is None else main, None)
        for parameter, state in added.items():
            members[parameter] = (state.membership, self._adopt(parameter, state))
        self._relist(members, order)

    def _adopt(self, parameter: torch.Tensor, state: ParameterState) -> torch.Tensor | None:
        inner = self._chain[state.membership.chain].optimizer
        main = state.main
        if main is not None:
            copy_tensor_model_parallel_attributes(main, parameter)
            _copy_metadata(main, parameter)
            parameter.main_param = main
        key = parameter if main is None else main
        numbers = restored_numbers(state.numbers, parameter)
        if state.tensors or numbers:
            inner.state[key] = {**numbers, **state.tensors}
        group = inner.param_groups[state.membership.group]
        if state.group_step is not None and not group["params"]:
            # Fused Adam skips empty groups without counting; the first layer to arrive brings the count along.
            group["step"] = state.group_step
        elif state.group_step != group.get("step"):
            raise ValueError(f"optimizer group step: expected {group.get('step')}, a layer arrived with {state.group_step}")
        return main

    def _real(self) -> Iterator[tuple[int, Any]]:
        """(index, wrapper) of those that optimise anything: Megatron keeps a stub where nothing is trainable."""
        return ((chain, wrapper) for chain, wrapper in enumerate(self._chain) if wrapper.optimizer is not None)

    def _members(self) -> dict[torch.Tensor, tuple[Membership, torch.Tensor | None]]:
        """Every model parameter the optimizer holds, read from its own lists (nothing is cached that could go stale)."""
        members: dict[torch.Tensor, tuple[Membership, torch.Tensor | None]] = {}
        for chain, wrapper in self._real():
            for group, torch_group in enumerate(wrapper.optimizer.param_groups):
                here = Membership(chain, group)
                if not hasattr(wrapper, "float16_groups"):
                    members |= {parameter: (here, None) for parameter in torch_group["params"]}
                    continue
                pairs = zip(wrapper.float16_groups[group], wrapper.fp32_from_float16_groups[group], strict=True)
                members |= {parameter: (here, main) for parameter, main in pairs}
                members |= {parameter: (here, None) for parameter in wrapper.fp32_from_fp32_groups[group]}
        return members

    def _relist(
        self,
        members: Mapping[torch.Tensor, tuple[Membership, torch.Tensor | None]],
        order: Iterable[torch.Tensor],
    ) -> None:
        """Write all lists anew, in model order: the order a fresh build at this layout would give."""
        ordered = [(parameter, *members[parameter]) for parameter in order if parameter in members]
        if len(ordered) != len(members):
            raise ValueError(f"optimizer: expected {len(members)} parameters in the model's order, got {len(ordered)}")
        for chain, wrapper in self._real():
            for group, torch_group in enumerate(wrapper.optimizer.param_groups):
                mine = [(parameter, main) for parameter, where, main in ordered if where == Membership(chain, group)]
                torch_group["params"] = [parameter if main is None else main for parameter, main in mine]
                if hasattr(wrapper, "float16_groups"):
                    halves = [(parameter, main) for parameter, main in mine if main is not None]
                    wrapper.float16_groups[group] = [parameter for parameter, _ in halves]
                    wrapper.fp32_from_float16_groups[group] = [main for _, main in halves]
                    wrapper.fp32_from_fp32_groups[group] = [parameter for parameter, main in mine if main is None]


def _copy_metadata(main: torch.Tensor, parameter: torch.Tensor) -> None:
    """What the optimizer looks for on a parameter (shared between stages? an expert?), on its fp32 copy as well."""
    if copy := getattr(host_optimizer, "copy_optimizer_param_metadata", None):
        copy(main, parameter)
    elif hasattr(parameter, "shared"):
        # megatron-core 0.17 and 0.18 copy this attribute alone, inside a constructor.
        main.shared = parameter.shared
