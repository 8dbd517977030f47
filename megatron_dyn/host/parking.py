"""The optimizer state of parameters that do not train for now: kept on their layer, in host memory, or made anew.

Parked state is of the parameter's full shape on every replica, whatever the optimizer shards, so that it moves with the layer
and is saved with it like any buffer (`host.carried`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from megatron_dyn.host.carried import Carried, cut_of
from megatron_dyn.host.optimizer import Membership, ParameterState, ScalarTensor
from megatron_dyn.ports import JobError

PARKED = "dyn_parked"
"""Name of the child module that holds parked state."""


class Parking:
    """What one parameter's state consists of in this job. One per rank."""

    def __init__(self, inner: Iterable[Any]) -> None:
        """`inner` are the torch optimizers of the job. Raises JobError for one whose state is not known here."""
        self._moments: tuple[str, ...] = ()
        self.numbers: Mapping[str, Any] = {}
        """What the optimizer counts beside the moments: the steps, in torch's Adam. Megatron's checkpoints know one count for
        all parameters, so one that trains again goes on with that of the others, as it would under fused Adam."""
        for optimizer in inner:
            self._moments, self.numbers = _kinds(optimizer)

    def fresh(self, parameter: torch.Tensor, membership: Membership, group_step: object) -> ParameterState:
        """The whole state of a parameter without moments."""
        half = parameter.dtype != torch.float32
        return ParameterState(
            membership=membership,
            main=parameter.detach().float().clone() if half else None,
            tensors={
                kind: torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device) for kind in self._moments
            },
            numbers=dict(self.numbers),
            group_step=group_step,
        )

    def put(self, module: torch.nn.Module, name: str, parameter: torch.Tensor, state: ParameterState) -> None:
        """Park the whole state of parameter `name` of a layer; what it lacks (no step was made yet) is parked as fresh."""
        if not hasattr(module, PARKED):
            module.add_module(PARKED, Carried(on_cpu=True))
        carried: Any = getattr(module, PARKED)
        whole = self.fresh(parameter, state.membership, None)
        tensors = {f"{kind}:{name}": state.tensors.get(kind, empty) for kind, empty in whole.tensors.items()}
        if state.main is not None:
            tensors[f"main:{name}"] = state.main
        for key, tensor in tensors.items():
            carried.put(key, tensor.detach().to("cpu", copy=True), cut_of(parameter))

    def take(
        self, module: torch.nn.Module, name: str, parameter: torch.Tensor, membership: Membership, group_step: object
    ) -> ParameterState:
        """Take back what was parked of parameter `name`, or make it anew where nothing was."""
        state = self.fresh(parameter, membership, group_step)
        carried: Any = getattr(module, PARKED, None)
        if carried is None:
            return state

        def back(kind: str) -> torch.Tensor | None:
            tensor = carried.get(f"{kind}:{name}")
            if tensor is not None:
                carried.drop(f"{kind}:{name}")
            return None if tensor is None else tensor.to(parameter.device)

        moments = {kind: back(kind) for kind in state.tensors}
        main = back("main")
        if not carried.names():
            delattr(module, PARKED)
        return replace(
            state,
            main=state.main if main is None else main,
            tensors={kind: state.tensors[kind] if tensor is None else tensor for kind, tensor in moments.items()},
        )


def parked_child(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a layer that arrives the parked state that came with it, by buffer name."""
    parameters = dict(module.named_parameters())
    child = Carried(on_cpu=True)
    for buffer, tensor in tensors.items():
        name = buffer.removeprefix(f"{PARKED}.").replace("/", ".")
        child.put(name, tensor.to("cpu"), cut_of(parameters[name.partition(":")[2]]))
    module.add_module(PARKED, child)


def _kinds(optimizer: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Names of the moments, and the numbers of a parameter before its first step."""
    if isinstance(optimizer, torch.optim.SGD):
        momentum = any(group.get("momentum") for group in optimizer.param_groups)
        return (("momentum_buffer",) if momentum else ()), {}
    if isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return ("exp_avg", "exp_avg_sq"), {"step": ScalarTensor(0.0, "float32", "cpu")}
    if "adam" in type(optimizer).__name__.lower():
        # Apex's and Transformer Engine's count steps by group.
        return ("exp_avg", "exp_avg_sq"), {}
    raise JobError(f"optimizer: expected Adam or SGD, got {type(optimizer).__name__}")
