"""Freezing while the job runs: a chunk in which other parameters train than before gets new buffers, hooks and optimizer.

A move without moves: Megatron's DDP and optimizers know their parameters from their construction on, so both are made anew, in
place, around what trains now. With the distributed optimizer the borders of all shards of the chunk shift; state then travels
within the data-parallel group, one parameter at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megatron_dyn.host.buffer_layout import owned_ranges
from megatron_dyn.host.checkpoint import finish_saves
from megatron_dyn.host.chunk import ModelChunk
from megatron_dyn.host.optimizer import ListEditor, Membership, ParameterState
from megatron_dyn.host.parking import Parking
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.host.workplace import Workplace
from megatron_dyn.ports import JobError

Name = tuple[str, str]
"""Unit (`layer 3`, `stage 0 chunk 0`) and name of a parameter in it: the same on every rank that holds it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter is on this rank."""

    name: Name
    home: torch.nn.Module | None
    """The layer or embedding that carries what is parked of it; None for one that never freezes."""
    name_at_home: str


Places = Mapping[torch.Tensor, Place]
"""Of every parameter here, in the model's order. Made once for each change, and never kept: layers move away."""


class Refitter:
    """One per rank."""

    def __init__(self, workplace: Workplace) -> None:
        """Bound to the job's own model and optimizer, while all that will ever train does. All ranks must construct it."""
        self._stage, self._editor, self._collective = workplace.stage, workplace.editor, workplace.collective
        self._chain = list(getattr(workplace.optimizer, "chained_optimizers", [workplace.optimizer]))
        inner = [wrapper.optimizer for wrapper in self._chain if getattr(wrapper, "optimizer", None) is not None]
        self._parking = Parking(inner)
        self._members = self._gather_members()
        """The optimizer group of every parameter of the model that trained at the start, wherever it is now."""

    def set_trainable(self, frozen_layers: frozenset[int], *, embedding_frozen: bool, park: bool) -> None:
        """See ports.Job."""
        places = self._places()
        wanted = self._wanted(places, frozen_layers, embedding_frozen=embedding_frozen)
        changed = {parameter for parameter, trains in wanted.items() if parameter.requires_grad != trains}
        # Everybody comes here, whatever changes here: a save in flight refers to the tensors that it was started with.
        finish_saves()
        self.count_steps()
        chunks = [chunk for chunk in self._stage.chunks if any(parameter in changed for parameter in chunk.ddp.parameters())]
        if not chunks:
            return
        hooks_on = {chunk.index: chunk.hooks_on for chunk in chunks}
        for chunk in chunks:
            chunk.sync_parameters()
        if isinstance(self._editor, ListEditor):
            self._refit_lists(self._editor, chunks, places, wanted, park=park, hooks_on=hooks_on)
        else:
            self._refit_shards(self._editor, chunks, places, wanted, park=park, hooks_on=hooks_on)

    def count_steps(self) -> float | None:
        """How many steps the parameters that train have made, also where none of them is; None before the first one, or where
        the optimizer does not count. All ranks must call.

        Megatron keeps one number for all parameters: checkpoints hold one and refuse two.
        """
        states = [state for state in self._editor.states().values() if state.tensors or state.numbers]
        mine = (dict(states[0].numbers), states[0].group_step) if states else None
        told = [theirs for theirs in self._collective.gather(mine, "steps of the optimizer") if theirs is not None]
        if not told:
            return None
        self._parking.numbers, group_step = told[0]
        for group in [] if group_step is None else [group for part in self._chain for group in part.param_groups]:
            # Fused Adam counts by group and skips empty ones, which Megatron would then save with the old count.
            if not group["params"]:
                group["step"] = group_step
        step: object = self._parking.numbers.get("step", group_step)
        return None if step is None else float(getattr(step, "value", step))

    def _wanted(self, places: Places, frozen_layers: frozenset[int], *, embedding_frozen: bool) -> dict[torch.Tensor, bool]:
        """Whether each parameter here is to train; parameters that never did stay as they are."""
        frozen_units = {f"layer {layer}" for layer in frozen_layers}
        frozen = {parameter for parameter, place in places.items() if place.name[0] in frozen_units}
        if embedding_frozen:
            frozen |= self._embedding_parameters()
        return {parameter: parameter not in frozen for parameter, place in places.items() if place.name in self._members}

    def _embedding_parameters(self) -> set[torch.Tensor]:
        """Those of the embedding, but for a table that the head or MTP layers use as well: there it goes on training."""
        for chunk in self._stage.chunks:
            if chunk.has_embedding:
                # MTP layers look words up in a copy of the table, on the stage where they are.
                tied = chunk.model.share_embeddings_and_output_weights or getattr(chunk.config, "mtp_num_layers", None)
                shared = {chunk.model.shared_embedding_or_output_weight()} if tied else set()
                return set(chunk.model.embedding.parameters()) - shared
        return set()

    def _refit_lists(
        self,
        editor: ListEditor,
        chunks: Sequence[ModelChunk],
        places: Places,
        wanted: Mapping[torch.Tensor, bool],
        *,
        park: bool,
        hooks_on: Mapping[int, bool],
    ) -> None:
        freezing = [parameter for parameter, trains in wanted.items() if parameter.requires_grad and not trains]
        thawing = [parameter for parameter, trains in wanted.items() if trains and not parameter.requires_grad]
        states = editor.export(freezing) if park else {}
        _release(chunks)
        for parameter, state in states.items():
            self._park(places[parameter], parameter, state)
        added = {parameter: self._taken(places[parameter], parameter) for parameter in thawing}
        editor.edit(removed=freezing, added=added, order=self._stage.parameters())
        for parameter in freezing:
            parameter.main_param = None  # type: ignore[attr-defined]
        for parameter, trains in wanted.items():
            parameter.requires_grad_(trains)
        for chunk in chunks:
            chunk.rewrap(hooks_on=hooks_on[chunk.index])

    def _refit_shards(
        self,
        editor: ShardEditor,
        chunks: Sequence[ModelChunk],
        places: Places,
        wanted: Mapping[torch.Tensor, bool],
        *,
        park: bool,
        hooks_on: Mapping[int, bool],
    ) -> None:
        trained = {parameter for parameter in self._stage.parameters() if parameter.requires_grad}
        before, ranges = editor.states(), editor.ranges()
        for parameter, trains in wanted.items():
            parameter.requires_grad_(trains)
        borders = _borders_after(ranges, chunks)
        _release(chunks)
        after: dict[torch.Tensor, ParameterState] = {}
        # In the model's order, which is that of every rank of the data-parallel group.
        for parameter in [parameter for chunk in chunks for parameter in chunk.ddp.parameters()]:
            state = None
            if parameter in trained:
                state = self._whole(places[parameter], parameter, before.pop(parameter, None), ranges.get(parameter))
            if park and state is not None and not parameter.requires_grad:
                self._park(places[parameter], parameter, state)
            if parameter.requires_grad and state is None:
                state = self._taken(places[parameter], parameter)
            if parameter in borders and state is not None:
                after[parameter] = _cut(state, borders[parameter])
        # What is left belongs to chunks that stay as they are.
        after |= before
        editor.let_go()
        for chunk in chunks:
            chunk.rewrap(hooks_on=hooks_on[chunk.index])

        def assemble(parameter: torch.Tensor, owned: tuple[int, int]) -> ParameterState:
            if owned != borders.get(parameter):
                raise JobError(f"{places[parameter].name}: planned elements {borders.get(parameter)}, Megatron owns {owned}")
            return after.pop(parameter)

        members = {parameter: self._members[place.name] for parameter, place in places.items() if parameter.requires_grad}
        editor.rebuild(members, assemble)

    def _whole(
        self, place: Place, parameter: torch.Tensor, state: ParameterState | None, borders: tuple[int, int] | None
    ) -> ParameterState:
        """The state of all elements of a sharded parameter, put together over its data-parallel group."""
        membership = self._members[place.name]
        group = self._chain[membership.chain].data_parallel_group
        whole = self._parking.fresh(parameter, membership, self._group_step(membership))

        def joined(kind: str, like: torch.Tensor) -> torch.Tensor:
            tensor = torch.zeros_like(like).view(-1)
            piece = None if state is None else state.main if kind == "main" else state.tensors.get(kind)
            if piece is not None and borders is not None:
                tensor[borders[0] : borders[1]] = piece.detach()
            # As integers: every element is zero on all ranks but one, and so comes through in every bit, -0.0 as well.
            dist.all_reduce(tensor.view(torch.int32), group=group)
            return tensor.view(like.shape)

        return replace(
            whole,
            main=None if whole.main is None else joined("main", whole.main),
            tensors={kind: joined(kind, like) for kind, like in whole.tensors.items()},
        )

    def _park(self, place: Place, parameter: torch.Tensor, state: ParameterState) -> None:
        self._parking.put(_home(place), place.name_at_home, parameter, state)

    def _taken(self, place: Place, parameter: torch.Tensor) -> ParameterState:
        membership = self._members[place.name]
        return self._parking.take(_home(place), place.name_at_home, parameter, membership, self._group_step(membership))

    def _group_step(self, membership: Membership) -> object:
        step: object = self._chain[membership.chain].optimizer.param_groups[membership.group].get("step")
        return step

    def _places(self) -> dict[torch.Tensor, Place]:
        places: dict[torch.Tensor, Place] = {}
        for chunk in self._stage.chunks:
            unit = f"stage {self._stage.pp_rank} chunk {chunk.index}"
            homes = {f"layer {layer}": module for layer, module in chunk.layers.items()}
            if chunk.has_embedding:
                homes[unit] = chunk.model.embedding
            at_home = {own: (of, home, name) for of, home in homes.items() for name, own in home.named_parameters()}
            for name, parameter in chunk.ddp.module.named_parameters():
                of, home, name_at_home = at_home.get(parameter, (unit, None, ""))
                places[parameter] = Place((of, name if of == unit else name_at_home), home, name_at_home)
        return places

    def _gather_members(self) -> dict[Name, Membership]:
        places = self._places()
        mine = {places[parameter].name: state.membership for parameter, state in self._editor.states().items()}
        members: dict[Name, Membership] = {}
        for theirs in self._collective.gather(mine, "optimizer groups of all parameters"):
            members |= theirs
        return members


def _home(place: Place) -> torch.nn.Module:
    if place.home is None:
        raise JobError(f"{place.name}: neither in a layer nor in the embedding")
    return place.home


def _release(chunks: Sequence[ModelChunk]) -> None:
    """Before anything is parked: hooks know the modules that were there when they were made, and parking changes these."""
    for chunk in chunks:
        chunk.release_gradients()


def _borders_after(
    ranges: Mapping[torch.Tensor, tuple[int, int]], chunks: Sequence[ModelChunk]
) -> dict[torch.Tensor, tuple[int, int]]:
    """The elements of each parameter that this rank will own once `chunks` are wrapped around what trains now."""
    borders = dict(ranges)
    for chunk in chunks:
        for parameter in chunk.ddp.parameters():
            borders.pop(parameter, None)
        borders |= owned_ranges(chunk.ddp, chunk.layout_with([*chunk.block.layers]))
    return borders


def _cut(whole: ParameterState, borders: tuple[int, int]) -> ParameterState:
    """The state of elements `borders`, flat, with storage of its own."""

    def part(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1)[borders[0] : borders[1]].clone()

    return replace(
        whole,
        main=None if whole.main is None else part(whole.main),
        tensors={kind: part(tensor) for kind, tensor in whole.tensors.items()},
    )
