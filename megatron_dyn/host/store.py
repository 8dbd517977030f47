"""Megatron's side of a move: gives out what leaves, and is the LayerStore that the rebuild drives."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_dyn.host.checkpoint import finish_saves
from megatron_dyn.host.editors import Editor
from megatron_dyn.host.layer_state import export_layer, load_layer
from megatron_dyn.host.layout import publish
from megatron_dyn.host.optimizer import ListEditor, ParameterState
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.host.shards import Assembly, ShardPlanner
from megatron_dyn.host.stage import StageModel
from megatron_dyn.migrate import LayerState, Manifest, Ranges, Shard, ShardKey, Staged
from megatron_dyn.records import Layout, Plan


class MegatronLayerStore:
    """One per rank. Implements ports.LayerStore and migrate.Source on the job's own model and optimizer objects."""

    def __init__(self, stage: StageModel, editor: Editor, args: Any) -> None:
        """`args` are Megatron's global arguments, whose layout follows every move."""
        self._stage, self._editor, self._args = stage, editor, args
        self._planner: ShardPlanner | None = None
        if isinstance(editor, ShardEditor):
            self._planner = ShardPlanner(stage, editor, num_instances=args.num_distributed_optimizer_instances)
        self._prepared: dict[int, tuple[torch.nn.Module, dict[torch.Tensor, ParameterState]]] = {}
        self._staged = Staged.nothing()
        self._plan: Plan | None = None
        self._assembly: Assembly | None = None
        self._removed: list[torch.Tensor] = []
        self._hooks_on: dict[int, bool] = {}

    def quiesce(self) -> None:
        """See migrate.Source: saves are finished and parameters gathered, so that what moves is what the optimizer left."""
        finish_saves()
        for chunk in self._stage.chunks:
            chunk.sync_parameters()

    def export(self, layer: int) -> LayerState:
        """See migrate.Source. KeyError when the layer is not here."""
        module = self._stage.layers[layer]
        states = None
        if isinstance(self._editor, ListEditor):
            states = self._editor.export(parameter for parameter in module.parameters() if parameter.requires_grad)
        return export_layer(layer, module, states, self._stage.device)

    def shards(self, plan: Plan) -> Mapping[ShardKey, Shard]:
        """See migrate.Source."""
        return {} if self._planner is None else self._planner.held(plan)

    def outline(self, plan: Plan, arriving: Mapping[int, Manifest]) -> Ranges:
        """See migrate.Source."""
        return {} if self._planner is None else self._planner.outline(plan, arriving)

    def prepare(self, plan: Plan, staged: Staged) -> None:
        """See ports.LayerStore. The staged tensors become the layer's own. Raises CodecError on a misfit."""
        self._plan, self._staged = plan, staged
        chunk_of = {layer: chunk for chunk, layers in enumerate(self._layers_after(plan)) for layer in layers}
        for layer in list(staged.states):
            module = self._stage.build(layer, chunk_of[layer])
            self._prepared[layer] = (module, load_layer(module, staged.states.pop(layer)))

    def discard(self) -> None:
        """See ports.LayerStore."""
        self._prepared.clear()
        self._staged, self._plan = Staged.nothing(), None

    def detach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore."""
        chunks = self._touched()
        if not chunks:
            return
        if self._planner is not None and isinstance(self._editor, ShardEditor):
            self._assembly = Assembly(self._planner, self._editor, self._staged)
            self._editor.let_go()
        for chunk in chunks:
            self._hooks_on[chunk.index] = chunk.hooks_on
            chunk.release_gradients()
        gone = [self._stage.layers[layer] for layer in layers]
        self._removed = [parameter for module in gone for parameter in module.parameters() if parameter.requires_grad]

    def attach(self, layers: Sequence[int]) -> None:
        """See ports.LayerStore."""
        if not self._touched() or self._plan is None:
            self.discard()
            return
        modules = self._stage.layers | {layer: self._prepared[layer][0] for layer in layers}
        self._stage.deal(self._plan.after, modules)
        if isinstance(self._editor, ListEditor):
            added: dict[torch.Tensor, ParameterState] = {}
            for layer in layers:
                added |= self._prepared[layer][1]
            self._editor.edit(removed=self._removed, added=added, order=self._stage.parameters())
        self._removed = []
        self._prepared.clear()

    def publish(self, layout: Layout) -> None:
        """See ports.LayerStore."""
        # Built one by one, as 0.17 and 0.18 do it, the chunks have a config each.
        for config in {id(chunk.config): chunk.config for chunk in self._stage.chunks}.values():
            publish(config, self._args, layout)

    def rewrap(self) -> None:
        """See ports.LayerStore."""
        if self._assembly is not None:
            self._assembly.keep_only(self._stage.parameters())
        for chunk in self._touched():
            chunk.rewrap(hooks_on=self._hooks_on.pop(chunk.index))
        if isinstance(self._editor, ShardEditor) and self._assembly is not None:
            self._editor.rebuild(self._assembly.members(self._stage.chunks), self._assembly.assemble)
        self._assembly = None
        self._staged, self._plan = Staged.nothing(), None

    def _touched(self) -> list[Any]:
        return [] if self._plan is None else self._stage.touched(self._plan.before, self._plan.after)

    def _layers_after(self, plan: Plan) -> Sequence[range]:
        return plan.after.layers_by_chunk(self._stage.pp_rank)
