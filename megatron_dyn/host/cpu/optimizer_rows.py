"""Ledger rows that let the distributed optimizer save and load where it wraps torch's own Adam, in fp32.

On a GPU machine Apex or Transformer Engine bring the optimizer, and weights are bf16: Megatron's checkpoint code is
used to nothing else. Put in force by `host.cpu.activate`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_dyn.host.seams import Seam

_CLASS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


def _with_adam_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer.state_dict`: an optimizer that has not stepped yet, or has nothing to optimise, has a step.

    A stage that lost all its layers holds no parameter; the step that counts comes from the ranks that hold some.
    """

    @functools.wraps(original)
    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if inner is not None and not inner.state and self.init_state_fn is not None:
            self.init_state_fn(inner, self.config)
            for state in inner.state.values():
                state["step"] = torch.zeros(())
        if inner is None or any(group["params"] for group in inner.param_groups):
            return original(self)
        nothing = torch.nn.Parameter(torch.zeros(0))
        inner.param_groups[0]["params"].append(nothing)
        inner.state[nothing] = {"step": torch.zeros(())}
        try:
            return original(self)
        finally:
            inner.param_groups[0]["params"].clear()
            del inner.state[nothing]

    return state_dict


def _with_own_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `DistributedOptimizer.load_state_dict`: each parameter has its own counter, at the step that was saved."""

    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        original(self, state_dict)
        step = float(state_dict["optimizer"]["param_groups"][0]["step"])
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(step)

    return load_state_dict


def _write_main_parameter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_set_main_param_and_optimizer_states`: autograd lets it write, and it may go without a step."""

    @functools.wraps(original)
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: Any) -> None:
        with torch.no_grad():
            original(self, model_param, {"step": None, **tensors})

    return set_main_param_and_optimizer_states


OPTIMIZER_ROWS: tuple[Seam, ...] = (
    Seam(
        target=f"{_CLASS}.state_dict",
        why="torch's Adam has no state before its first step; Megatron asserts that it has when it loads a checkpoint",
        remove_when="it treats an empty state as step 0",
        wrap=_with_adam_state,
    ),
    Seam(
        target=f"{_CLASS}.load_state_dict",
        why="it leaves the step of torch's Adam at 0, or in one tensor for all parameters, to which each adds 1",
        remove_when="it gives each parameter the step of its group",
        parameters=("state_dict",),
        wrap=_with_own_steps,
    ),
    Seam(
        target=f"{_CLASS}._set_main_param_and_optimizer_states",
        why="shards of fp32 parameters are views of leaves, which autograd does not let it write; and it looks for the "
        "step, a tensor in torch's Adam alone, where no checkpoint holds one",
        remove_when="it writes under torch.no_grad() and skips the step",
        parameters=("model_param", "tensors"),
        wrap=_write_main_parameter,
    ),
)
