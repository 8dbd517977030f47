"""The store in a move: what is built beside the model, what is put in or forgotten, and the stages that a plan leaves alone."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_dyn.host import store
from megatron_dyn.host.layer_state import export_layer
from megatron_dyn.host.optimizer import ListEditor, Membership, ParameterState
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.migrate import CodecError, Key, LayerState, Staged
from megatron_dyn.plan import moves_between
from megatron_dyn.records import Layout, Plan

BEFORE, AFTER = Layout.contiguous([2, 2, 2, 2], num_stages=2), Layout.contiguous([2, 1, 3, 2], num_stages=2)
PLAN = Plan(before=BEFORE, after=AFTER, moves=moves_between(BEFORE, AFTER), reason="test")
"""Layer 3 leaves stage 1, chunk 0, for stage 0, chunk 1."""
CPU = torch.device("cpu")


class FakeChunk:
    """Notes what is asked of it."""

    hooks_on = True

    def __init__(self, index, calls):
        self.index, self._calls = index, calls

    def sync_parameters(self):
        self._calls.append(("sync", self.index))

    def release_gradients(self):
        self._calls.append(("release", self.index))

    def rewrap(self, *, hooks_on):
        self._calls.append(("rewrap", self.index, hooks_on))


class FakeStage:
    """Stands for the StageModel of one stage; a layer is a linear map filled with its id."""

    device = CPU

    def __init__(self, pp_rank, calls):
        self.pp_rank, self._calls = pp_rank, calls
        self.chunks = [FakeChunk(index, calls) for index in range(2)]
        self.layers = {layer: self.build(layer, None) for layer in BEFORE.layers_of_stage(pp_rank)}
        calls.clear()

    def build(self, layer, chunk_index):
        self._calls.append(("build", layer, chunk_index))
        module = torch.nn.Linear(2, 2, bias=False)
        torch.nn.init.constant_(module.weight, float(layer))
        return module

    def deal(self, layout, modules):
        self._calls.append(("deal", layout))
        self.layers = {layer: modules[layer] for layer in layout.layers_of_stage(self.pp_rank)}

    def parameters(self):
        return (parameter for module in self.layers.values() for parameter in module.parameters())

    def touched(self, before, after):
        pairs = zip(self.chunks, before.layers_by_chunk(self.pp_rank), after.layers_by_chunk(self.pp_rank), strict=True)
        return [chunk for chunk, here, there in pairs if here != there]


class FakeEditor(ListEditor):
    """Gives a moment for each parameter; notes what is edited."""

    def __init__(self, calls):
        super().__init__([])
        self._calls = calls

    def export(self, parameters):
        return {parameter: state_of(parameter) for parameter in parameters}

    def edit(self, *, removed, added, order):
        self._calls.append(("edit", list(removed), dict(added), list(order)))


def state_of(parameter):
    return ParameterState(membership=Membership(0, 0), main=None, tensors={"exp_avg": parameter.detach() + 0.5})


class Rank:
    """The store of one stage, and what it asked of chunks, stage and editor."""

    def __init__(self, pp_rank):
        self.calls = []
        self.stage = FakeStage(pp_rank, self.calls)
        self.store = MegatronLayerStore(self.stage, FakeEditor(self.calls), args=SimpleNamespace())

    def names(self):
        return [call[0] for call in self.calls]


def staged_layer():
    """Layer 3 as it arrives."""
    module = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(module.weight, 33.0)
    return export_layer(3, module, {module.weight: state_of(module.weight)}, CPU)


def staged(*states):
    return replace(Staged.nothing(), states={state.layer: state for state in states})


def same(found, expected):
    return len(found) == len(expected) and all(one is other for one, other in zip(found, expected, strict=True))


class TestBefore:
    def test_saves_are_finished_and_every_chunk_comes_to_rest(self, monkeypatch):
        rank = Rank(0)
        monkeypatch.setattr(store, "finish_saves", lambda: rank.calls.append("saves"))
        rank.store.quiesce()
        assert rank.calls == ["saves", ("sync", 0), ("sync", 1)]

    def test_a_layer_is_exported_live_with_its_optimizer_state(self):
        rank = Rank(1)
        state = rank.store.export(3)
        assert state.tensors[Key("parameter", "weight")].data_ptr() == rank.stage.layers[3].weight.data_ptr()
        assert torch.equal(state.tensors[Key("optimizer:exp_avg", "weight")], torch.full((2, 2), 3.5))
        with pytest.raises(KeyError):
            rank.store.export(0)

    def test_an_optimizer_that_is_not_sharded_offers_and_wants_no_shards(self):
        rank = Rank(0)
        assert (rank.store.shards(PLAN), rank.store.outline(PLAN, {})) == ({}, {})


class TestPrepare:
    def test_a_layer_is_built_for_its_chunk_beside_the_model_and_nothing_is_kept_beside_it(self):
        rank, arrived = Rank(0), staged(staged_layer())
        rank.store.prepare(PLAN, arrived)
        assert rank.calls == [("build", 3, 1)]
        assert arrived.states == {}
        assert list(rank.stage.layers) == [0, 1, 4, 5]

    def test_what_is_discarded_is_gone(self):
        rank = Rank(0)
        rank.store.prepare(PLAN, staged(staged_layer()))
        rank.store.discard()
        rank.calls.clear()
        # Without a plan in hand nothing is touched.
        rank.store.detach([])
        rank.store.attach([])
        rank.store.rewrap()
        assert rank.calls == []
        rank.store.prepare(PLAN, staged())
        with pytest.raises(KeyError):
            rank.store.attach([3])

    def test_a_layer_that_does_not_fit_leaves_nothing_to_attach(self):
        rank, state = Rank(0), staged_layer()
        misfit = LayerState(layer=3, tensors={**state.tensors, Key("buffer", "ghost"): torch.zeros(1)}, scalars=state.scalars)
        with pytest.raises(CodecError, match="ghost"):
            rank.store.prepare(PLAN, staged(misfit))
        with pytest.raises(KeyError):
            rank.store.attach([3])
        assert list(rank.stage.layers) == [0, 1, 4, 5]


class TestCommit:
    def committed(self, rank, arrived, *, leaving=(), arriving=()):
        rank.store.prepare(PLAN, arrived)
        rank.calls.clear()
        rank.store.detach(leaving)
        rank.store.attach(arriving)
        rank.store.rewrap()

    def test_a_layer_that_arrives_is_dealt_in_and_so_is_its_optimizer_state(self):
        rank, state = Rank(0), staged_layer()
        stays = dict(rank.stage.layers)
        self.committed(rank, staged(state), arriving=[3])
        assert rank.names() == ["release", "deal", "edit", "rewrap"]
        assert (rank.calls[0], rank.calls[1], rank.calls[3]) == (("release", 1), ("deal", AFTER), ("rewrap", 1, True))
        assert list(rank.stage.layers) == [0, 1, 3, 4, 5]
        assert all(rank.stage.layers[layer] is module for layer, module in stays.items())
        weight = rank.stage.layers[3].weight
        assert weight.data_ptr() == state.tensors[Key("parameter", "weight")].data_ptr()
        _, removed, added, order = rank.calls[2]
        assert (removed, list(added)) == ([], [weight])
        assert added[weight].tensors["exp_avg"] is state.tensors[Key("optimizer:exp_avg", "weight")]
        assert same(order, [module.weight for module in rank.stage.layers.values()])

    def test_a_layer_that_leaves_is_taken_out_and_so_is_its_optimizer_state(self):
        rank = Rank(1)
        weight = rank.stage.layers[3].weight
        self.committed(rank, staged(), leaving=[3])
        assert rank.names() == ["release", "deal", "edit", "rewrap"]
        assert (rank.calls[0], rank.calls[3]) == (("release", 0), ("rewrap", 0, True))
        _, removed, added, order = rank.calls[2]
        assert same(removed, [weight])
        assert (added, list(rank.stage.layers)) == ({}, [2, 6, 7])
        assert same(order, [module.weight for module in rank.stage.layers.values()])

    def test_hooks_that_the_training_loop_had_taken_off_stay_off(self):
        rank = Rank(1)
        rank.stage.chunks[0].hooks_on = False
        self.committed(rank, staged(), leaving=[3])
        assert rank.calls[-1] == ("rewrap", 0, False)

    def test_a_move_leaves_nothing_for_the_next(self):
        rank = Rank(0)
        self.committed(rank, staged(staged_layer()), arriving=[3])
        rank.calls.clear()
        rank.store.rewrap()
        assert rank.calls == []

    def test_a_stage_that_the_plan_leaves_alone_is_left_alone(self):
        rank = Rank(0)
        layers = dict(rank.stage.layers)
        other = replace(PLAN, after=Layout.contiguous([2, 2, 2, 2], num_stages=2), moves=())
        rank.store.prepare(other, staged())
        rank.store.detach([])
        rank.store.attach([])
        rank.store.rewrap()
        assert rank.calls == []
        assert rank.stage.layers == layers
