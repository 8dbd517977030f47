"""Checkpoints from ranks on which nothing trains: what they hold of the optimizer is right for the other ranks, too.

Megatron writes what all ranks share from the first rank alone. That is the first to freeze, and then it counts no steps: a
run that resumes would start Adam's bias correction anew. The rows are in force with `--dyn-freeze`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject

from megatron_dyn.host.seams import Seam

_DISTRIBUTED = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_HALF = "megatron.core.optimizer.optimizer:Float16OptimizerWithFloat16Params"
_MAINS = "fp32_from_fp16_params"
"""Megatron's key for the main parameters, a list of groups of tensors."""


class BareRanks:
    """One per rank and job."""

    def __init__(self) -> None:
        """Bound to no job yet: the rows are applied before there is one."""
        self._count: Callable[[], float | None] = lambda: None
        self._step: float | None = None

    def watch(self, count: Callable[[], float | None]) -> None:
        """`count` is Refitter.count_steps: all ranks call it at every save."""
        self._count = count

    def rows(self) -> tuple[Seam, ...]:
        """The ledger rows."""
        return (
            Seam(
                target="megatron.training.training:save_checkpoint",
                why="a rank on which nothing trains has to ask the others for the count of steps",
                remove_when="Megatron takes the common part of a checkpoint from a rank that has it",
                parameters=("model", "optimizer"),
                wrap=self._around_save,
            ),
            Seam(
                target="megatron.core.optimizer.optimizer:MegatronOptimizer._extract_common_per_param_step",
                why="without a parameter there is no count, and the checkpoint of all ranks goes without it",
                remove_when="Megatron takes the common part of a checkpoint from a rank that has it",
                parameters=("state_dict",),
                wrap=self._around_extract,
            ),
            Seam(
                target=f"{_DISTRIBUTED}.state_dict",
                why="without a parameter there is no count, and the checkpoint of all ranks goes without it",
                remove_when="Megatron takes the common part of a checkpoint from a rank that has it",
                wrap=self._around_state_dict,
            ),
            Seam(
                target=f"{_HALF}.sharded_state_dict",
                why="an empty group has nothing to shard, so it is taken for a part that all ranks share, and loads nowhere",
                remove_when="Megatron saves main parameters as it saves moments",
                parameters=("model_sharded_state_dict", "is_loading"),
                wrap=_with_groups_by_number,
            ),
            Seam(
                target=f"{_HALF}.load_state_dict",
                why="the counterpart of the row before",
                remove_when="Megatron saves main parameters as it saves moments",
                parameters=("state_dict",),
                wrap=_with_groups_in_line,
            ),
        )

    def _around_save(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._step = self._count()
            try:
                return original(*args, **kwargs)
            finally:
                self._step = None

        return save_checkpoint

    def _around_extract(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def extract(state_dict: Any) -> Any:
            step = original(state_dict)
            return torch.tensor(self._step) if step is None and self._step is not None else step

        return extract

    def _around_state_dict(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def state_dict(optimizer: Any) -> Any:
            state = original(optimizer)
            inner = optimizer.optimizer
            if self._step is not None and inner is not None and not any(group["params"] for group in inner.param_groups):
                for group in state["optimizer"]["param_groups"]:
                    group["step"] = self._step
            return state

        return state_dict


def _with_groups_by_number(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def sharded_state_dict(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        state = original(optimizer, *args, **kwargs)
        if not all(state[_MAINS]):
            held = {number: group for number, group in enumerate(state[_MAINS]) if group}
            state[_MAINS] = held or LocalNonpersistentObject(held)
        return state

    return sharded_state_dict


def _with_groups_in_line(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_state_dict(optimizer: Any, state_dict: Any) -> Any:
        if isinstance(held := state_dict.get(_MAINS), dict):
            groups = range(len(optimizer.fp32_from_float16_groups))
            state_dict = {**state_dict, _MAINS: [held.get(number, []) for number in groups]}
        return original(optimizer, state_dict)

    return load_state_dict
