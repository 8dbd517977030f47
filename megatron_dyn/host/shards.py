"""The distributed optimizer's side of a move: which shards are held, which will be, and how the new ones come together.

Stands between `sharded`, which edits the optimizer, and `migrate`, which moves ranges by name.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_dyn.host.buffer_layout import owned_ranges, takes_layout
from megatron_dyn.host.chunk import ModelChunk
from megatron_dyn.host.optimizer import Membership, ParameterState, is_expert
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.host.stage import StageModel
from megatron_dyn.migrate import Manifest, Ranges, Shard, ShardKey, ShardNote, Staged
from megatron_dyn.ports import JobError
from megatron_dyn.records import Plan


class ShardPlanner:
    """One per rank."""

    def __init__(self, stage: StageModel, editor: ShardEditor, *, num_instances: int) -> None:
        """`num_instances` is Megatron's --num-distributed-optimizer-instances: each shards on its own."""
        self._stage, self._editor = stage, editor
        # Asked now, since a release that cannot plan shards must be told at the start and not at the first move.
        takes_layout()
        self._instance = ""
        if num_instances > 1:
            group = parallel_state.get_inter_distributed_optimizer_instance_group()
            self._instance = f" instance {group.rank()}"

    def held(self, plan: Plan) -> dict[ShardKey, Shard]:
        """The live shards of the chunks that `plan` touches."""
        chunks = self._stage.touched(plan.before, plan.after)
        if not chunks:
            return {}
        states, ranges = self._editor.states(), self._editor.ranges()
        return {
            key: _shard(states[parameter], ranges[parameter])
            for parameter, key in self.names(chunks).items()
            if parameter in states
        }

    def outline(self, plan: Plan, arriving: Mapping[int, Manifest]) -> Ranges:
        """What this rank will own of the chunks that `plan` touches, once the layers in `arriving` are here."""
        chunks = self._stage.touched(plan.before, plan.after)
        stand_ins = {layer: _stand_in(manifest) for layer, manifest in arriving.items()}
        modules = self._stage.layers | {layer: module for layer, (module, _) in stand_ins.items()}
        arrived = {
            parameter: ShardKey(f"layer {layer}", name, self._coordinate(parameter))
            for layer, (_, names) in stand_ins.items()
            for parameter, name in names.items()
        }
        names = self.names(self._stage.chunks) | arrived
        wanted: dict[ShardKey, tuple[int, int]] = {}
        layers_after = plan.after.layers_by_chunk(self._stage.pp_rank)
        for chunk in chunks:
            layout = chunk.layout_with([modules[layer] for layer in layers_after[chunk.index]])
            owned = owned_ranges(chunk.ddp, layout)
            wanted |= {names[parameter]: borders for parameter, borders in owned.items()}
        return wanted

    def names(self, chunks: Sequence[ModelChunk]) -> dict[torch.Tensor, ShardKey]:
        """The key of every trainable parameter of some chunks, in the model's order."""
        keys = {}
        for chunk in chunks:
            in_layers = {
                parameter: (f"layer {layer}", name)
                for layer, module in chunk.layers.items()
                for name, parameter in module.named_parameters()
            }
            for name, parameter in chunk.ddp.module.named_parameters():
                if parameter.requires_grad:
                    unit, within = in_layers.get(parameter, (f"stage {self._stage.pp_rank} chunk {chunk.index}", name))
                    keys[parameter] = ShardKey(unit, within, self._coordinate(parameter))
        return keys

    def _coordinate(self, parameter: torch.Tensor) -> str:
        """What tells apart the slices and copies of a parameter whose shards do not belong together."""
        if is_expert(parameter):
            expert, tensor = (
                parallel_state.get_expert_model_parallel_rank(),
                parallel_state.get_expert_tensor_parallel_rank(),
            )
            return f"ep {expert} etp {tensor}{self._instance}"
        return f"tp {parallel_state.get_tensor_model_parallel_rank()}{self._instance}"


class Assembly:
    """The shards of this rank on their way from the old borders to the new ones. Made at the commit, used up by it."""

    def __init__(self, planner: ShardPlanner, editor: ShardEditor, staged: Staged) -> None:
        """Takes hold of the live shards; `ShardEditor.let_go` may follow."""
        self._planner, self._staged = planner, staged
        self._states, self._ranges = editor.states(), editor.ranges()
        self._names: dict[torch.Tensor, ShardKey] = {}

    def keep_only(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let go of what has left this rank: it would hold its part of the old parameter buffer, and so all of that."""
        staying = set(parameters)
        self._states = {parameter: state for parameter, state in self._states.items() if parameter in staying}
        self._ranges = {parameter: borders for parameter, borders in self._ranges.items() if parameter in staying}

    def members(self, chunks: Sequence[ModelChunk]) -> dict[torch.Tensor, Membership]:
        """The optimizer group of the trainable parameters, in model order, for `ShardEditor.rebuild`. Before `assemble`."""
        self._names = self._planner.names(chunks)
        members = {}
        for parameter, key in self._names.items():
            state = self._states.get(parameter)
            if state is None and key not in self._staged.facts:
                # A chunk that stays as it is, of a parameter that other ranks own: its group matters to no one here.
                continue
            members[parameter] = self._staged.facts[key][0] if state is None else state.membership
        return members

    def assemble(self, parameter: torch.Tensor, borders: tuple[int, int]) -> ParameterState:
        """The state of elements `borders` of a parameter; what it was made from is freed. Raises JobError on a misfit."""
        key = self._names[parameter]
        expected = self._staged.wanted.get(key, self._ranges.get(parameter))
        if borders != expected:
            raise JobError(f"optimizer state of {key.unit} {key.name}: planned elements {expected}, Megatron owns {borders}")
        before, held_range = self._states.pop(parameter, None), self._ranges.get(parameter, (0, 0))
        arrived = self._staged.ranges.pop(key, [])
        if before is not None and held_range == borders:
            return before
        pieces = list(arrived) if before is None else [(held_range[0], _tensors(before)), *arrived]
        if before is None:
            membership, numbers, group_step = self._staged.facts[key]
        else:
            membership, numbers, group_step = before.membership, before.numbers, before.group_step
        whole = _join(pieces, borders)
        return ParameterState(
            membership=membership,
            main=whole.pop("main", None),
            tensors={kind.partition(":")[2]: tensor for kind, tensor in whole.items()},
            numbers=numbers,
            group_step=group_step,
        )


def _tensors(state: ParameterState) -> dict[str, torch.Tensor]:
    """The shard's tensors by the kinds that travel."""
    main = {} if state.main is None else {"main": state.main.detach()}
    return main | {f"optimizer:{name}": tensor for name, tensor in state.tensors.items()}


def _shard(state: ParameterState, borders: tuple[int, int]) -> Shard:
    tensors = _tensors(state)
    kinds = tuple((kind, str(tensor.dtype).removeprefix("torch.")) for kind, tensor in tensors.items())
    facts = (state.membership, dict(state.numbers), state.group_step)
    return Shard(note=ShardNote(start=borders[0], end=borders[1], kinds=kinds, facts=facts), tensors=tensors)


def _join(pieces: Sequence[tuple[int, Mapping[str, torch.Tensor]]], borders: tuple[int, int]) -> dict[str, torch.Tensor]:
    """Elements `borders` put together from pieces that cover them, by kind; a piece may reach beyond."""
    start, end = borders
    whole: dict[str, torch.Tensor] = {}
    for first, tensors in pieces:
        for kind, tensor in tensors.items():
            if kind not in whole:
                whole[kind] = torch.empty(end - start, dtype=tensor.dtype, device=tensor.device)
            low, high = max(first, start), min(first + tensor.numel(), end)
            if low < high:
                whole[kind][low - start : high - start] = tensor[low - first : high - first]
    return whole


def _stand_in(manifest: Manifest) -> tuple[torch.nn.Module, dict[torch.Tensor, str]]:
    """A module with the trainable parameters of a layer that is not here, without storage; and their names."""
    module, names = torch.nn.Module(), {}
    for index, entry in enumerate(manifest.entries):
        trainable: Any = manifest.scalars.get(entry.key.name)
        if entry.key.kind == "parameter" and trainable is not None:
            parameter = torch.nn.Parameter(torch.empty(entry.shape, dtype=getattr(torch, entry.dtype), device="meta"))
            parameter.allreduce = not trainable.expert  # type: ignore[attr-defined]
            module.register_parameter(f"parameter_{index}", parameter)
            names[parameter] = entry.key.name
    return module, names
