"""Edits Megatron's distributed optimizer in place: gives out its shards, and builds it anew around other buffers and shards.

The optimizer objects stay, because `train()` holds them as locals. Which elements a rank owns follows from the buffers of the
model chunks (`buffer_layout`); what they hold comes from here and from other ranks. Source of the structure:
megatron/core/optimizer/distrib_optimizer.py.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from megatron_dyn.host.optimizer import Membership, ParameterState, numbers_and_tensors, restored_numbers
from megatron_dyn.ports import JobError

Assemble = Callable[[torch.Tensor, tuple[int, int]], ParameterState]
"""The state of a parameter's elements (start, end), made or found when it is asked for, so that one at a time is doubled."""


class ShardEditor:
    """One per rank, bound to the distributed optimizers of the job."""

    def __init__(self, chain: list[Any]) -> None:
        """`chain` holds every DistributedOptimizer of the job, those without a parameter on this rank included."""
        self._chain = chain

    def ranges(self) -> dict[torch.Tensor, tuple[int, int]]:
        """(start, end) of the shard of each parameter of which this rank owns anything."""
        owned = {}
        for wrapper in self._real():
            for parameter in wrapper.model_param_gbuf_map:
                borders = wrapper._get_model_param_range_map(parameter)["param"]
                owned[parameter] = (borders.start, borders.end)
        return owned

    def states(self) -> dict[torch.Tensor, ParameterState]:
        """The live shards of this rank by model parameter; their tensors are flat, of the length of the range."""
        states = {}
        for chain, wrapper in enumerate(self._chain):
            if wrapper.is_stub_optimizer:
                continue
            for group, torch_group in enumerate(wrapper.optimizer.param_groups):
                for parameter, main, key in _group_members(wrapper, group):
                    numbers, tensors = numbers_and_tensors(wrapper.optimizer.state.get(key, {}))
                    states[parameter] = ParameterState(
                        membership=Membership(chain, group),
                        main=main,
                        tensors=tensors,
                        numbers=numbers,
                        group_step=torch_group.get("step"),
                    )
        return states

    @torch.no_grad()
    def silence(self, masks: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Clear main parameters and moments, as far as they are here, wherever the mask of the whole parameter is False."""
        ranges = self.ranges()
        for parameter, state in self.states().items():
            if parameter in masks:
                start, end = ranges[parameter]
                piece = masks[parameter].view(-1)[start:end]
                for tensor in (state.main, *state.tensors.values()):
                    if tensor is not None:
                        tensor.mul_(piece)

    def let_go(self) -> None:
        """Drop every reference to buffers and shards, so that they are freed when their last user goes."""
        for wrapper in self._real():
            wrapper.optimizer.state.clear()
            for group in wrapper.optimizer.param_groups:
                group["params"] = []
            wrapper.buffers = []
            wrapper.per_model_buffers = dict.fromkeys(wrapper.per_model_buffers, [])
            wrapper.per_model_bucket_groups = {}
            wrapper.gbuf_ranges, wrapper.model_param_gbuf_map = [], {}
            wrapper.model_param_group_index_map, wrapper.opt_group_ranges = {}, []
            for name in _LISTS:
                setattr(wrapper, name, [])

    def rebuild(self, members: Mapping[torch.Tensor, Membership], assemble: Assemble) -> None:
        """Initialise the same optimizers again, around the buffers that the chunks have now.

        `members` are the trainable parameters in model order; of chunks that stay as they are, those owned elsewhere may be
        missing. Raises JobError when groups have counted different steps.
        """
        for chain, wrapper in enumerate(self._chain):
            if wrapper.is_stub_optimizer:
                continue
            for group, torch_group in enumerate(wrapper.optimizer.param_groups):
                torch_group["params"] = [key for key, where in members.items() if where == Membership(chain, group)]
            found: dict[torch.Tensor, ParameterState] = {}
            _initialise(wrapper, _builder(wrapper, assemble, found))
            for group, torch_group in enumerate(wrapper.optimizer.param_groups):
                _fill(wrapper, group, torch_group, found)

    def _real(self) -> Iterable[Any]:
        return (wrapper for wrapper in self._chain if not wrapper.is_stub_optimizer)


_LISTS = (
    "model_float16_groups",
    "model_fp32_groups",
    "shard_float16_groups",
    "shard_fp32_groups",
    "shard_fp32_from_float16_groups",
)
"""Attributes that Megatron fills from `_build_model_and_main_param_groups`, in its order: lists of groups of tensors."""


def _group_members(wrapper: Any, group: int) -> Iterable[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]]:
    """(model parameter, main shard or None, key of its state) of one parameter group."""
    halves = zip(wrapper.model_float16_groups[group], wrapper.shard_fp32_from_float16_groups[group], strict=True)
    yield from ((parameter, main, main) for parameter, main in halves)
    singles = zip(wrapper.model_fp32_groups[group], wrapper.shard_fp32_groups[group], strict=True)
    yield from ((parameter, None, shard) for parameter, shard in singles)


def _initialise(wrapper: Any, builder: Callable[..., Any]) -> None:
    """Run Megatron's own constructor on the optimizer that there is; `builder` stands in for the one step that copies."""
    expert = any(group.get("is_expert_parallel") for group in wrapper.optimizer.param_groups)
    name = "expert_parallel_buffers" if expert else "buffers"
    buffers = [getattr(chunk, name) for chunk in wrapper.model_chunks]
    wrapper._build_model_and_main_param_groups = builder
    try:
        type(wrapper).__init__(
            wrapper,
            wrapper.optimizer,
            wrapper.config,
            wrapper.grad_scaler,
            wrapper.init_state_fn,
            model_chunks=wrapper.model_chunks,
            per_model_buffers=dict(zip(wrapper.per_model_buffers, buffers, strict=True)),
            data_parallel_group=wrapper.data_parallel_group,
            data_parallel_group_gloo=wrapper.data_parallel_group_gloo,
            data_parallel_group_idx=wrapper.data_parallel_group_idx,
            distributed_optimizer_instance_id=wrapper.distributed_optimizer_instance_id,
        )
    finally:
        del wrapper._build_model_and_main_param_groups


def _builder(wrapper: Any, assemble: Assemble, found: dict[torch.Tensor, ParameterState]) -> Callable[..., Any]:
    """Megatron's step that makes main parameters, done one parameter at a time, with our shard in place of its copy.

    Done at once, the copies of all main parameters would stand beside the shards that replace them.
    """

    def build(gbuf_ranges: Any, param_gbuf_map: Any, group_ranges: Any, config: Any) -> tuple[list[list[Any]], ...]:
        columns: tuple[list[list[Any]], ...] = tuple([] for _ in _LISTS)
        for group_range in group_ranges:
            for column in columns:
                column.append([])
            for parameter in group_range["params"]:
                one = [{"params": [parameter], "orig_group": {}}]
                parts = type(wrapper)._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, one, config)
                for column, part in zip(columns, parts, strict=True):
                    column[-1].extend(part[0])
                borders = wrapper._get_model_param_range_map(parameter)["param"]
                state = found[parameter] = assemble(parameter, (borders.start, borders.end))
                if getattr(parameter, "main_param", None) is not None:
                    parameter.main_param.data = state.main
            # As Megatron orders them: parameters that are fp32 themselves before the fp32 copies of the others.
            group_range["orig_group"]["params"] = [*columns[3][-1], *columns[4][-1]]
        return columns

    return build


def _fill(wrapper: Any, group: int, torch_group: Any, found: Mapping[torch.Tensor, ParameterState]) -> None:
    """Give the torch optimizer the moments and counters of one parameter group."""
    members = list(_group_members(wrapper, group))
    for parameter, _, key in members:
        state = found[parameter]
        if state.tensors or state.numbers:
            wrapper.optimizer.state[key] = {**restored_numbers(state.numbers, parameter), **state.tensors}
    steps = {found[parameter].group_step for parameter, _, _ in members} - {None}
    if len(steps) > 1:
        raise JobError(f"optimizer group {group}: expected one step count, its parameters bring {sorted(steps)}")
    if steps:
        # Fused Adam counts per group and skips empty ones; a layer that arrives in one brings the count along.
        torch_group["step"] = steps.pop()
