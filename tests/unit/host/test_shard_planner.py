"""Planning shards over a whole job of fake ranks: what is planned is what Megatron would cut in a stage built that way."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig

from megatron_dyn.host import shards
from megatron_dyn.host.buffer_layout import owned_ranges
from megatron_dyn.host.chunk import ModelChunk
from megatron_dyn.host.layer_state import export_layer
from megatron_dyn.host.optimizer import Membership, ParameterState
from megatron_dyn.host.shards import Assembly, ShardPlanner
from megatron_dyn.host.stage import StageModel
from megatron_dyn.migrate import Staged, describe, plan_ranges
from megatron_dyn.plan import moves_between
from megatron_dyn.records import Layout, Plan, Receipt

NUM_REPLICAS = 2
EMPTY = Receipt(plan_digest="", sent_layers=(), received_layers=(), sent_bytes=0, received_bytes=0, seconds=0.0)


class Layer(torch.nn.Module):
    """Two dense parameters, one that is frozen, one of an expert's; sizes differ from layer to layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer_number = layer + 1
        self.weight = torch.nn.Parameter(torch.zeros(50 + 30 * layer, dtype=torch.bfloat16))
        self.frozen = torch.nn.Parameter(torch.zeros(7), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(90))
        self.expert = torch.nn.Parameter(torch.zeros(70, dtype=torch.bfloat16))
        self.expert.allreduce = False


def group(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def chunk_of(layers, index, pp_rank, replica, *, first):
    """A ModelChunk without Megatron's constructors: its block, and an embedding on the first."""
    chunk = ModelChunk.__new__(ModelChunk)
    module = torch.nn.Module()
    if first:
        module.embedding = torch.nn.Parameter(torch.zeros(130, dtype=torch.bfloat16))
    module.decoder = chunk.block = torch.nn.Module()
    chunk.block.layers = torch.nn.ModuleList(Layer(layer) for layer in layers)
    chunk.index = index
    chunk.ddp = SimpleNamespace(
        module=module,
        pp_group=group(pp_rank, 2),
        intra_dp_cp_group=group(replica, NUM_REPLICAS),
        intra_expt_dp_group=group(replica, NUM_REPLICAS),
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=100),
    )
    return chunk


def values(key, start, end):
    """Elements of the parameter's optimizer state: numbers that tell parameter and place."""
    base = 1000.0 * sum(map(ord, f"{key.unit} {key.name} {key.coordinate}"))
    return torch.arange(start, end, dtype=torch.float64) + base


class Rank:
    """One rank of a job at a layout, with a sharded optimizer that holds what Megatron would give it."""

    def __init__(self, layout, rank):
        pp_rank, replica = divmod(rank, NUM_REPLICAS)
        self.stage = StageModel.__new__(StageModel)
        self.stage.pp_rank = pp_rank
        self.stage.chunks = [
            chunk_of(layers, index, pp_rank, replica, first=(index, pp_rank) == (0, 0))
            for index, layers in enumerate(layout.layers_by_chunk(pp_rank))
        ]
        self.planner = ShardPlanner(self.stage, self, num_instances=1)

    def ranges(self):
        """See ShardEditor."""
        owned = {}
        for chunk in self.stage.chunks:
            owned |= owned_ranges(chunk.ddp, chunk.layout_with([*chunk.block.layers]))
        return owned

    def states(self):
        """See ShardEditor."""
        names = self.planner.names(self.stage.chunks)
        return {
            parameter: ParameterState(
                membership=Membership(0, parameter.numel() % 3),
                main=None,
                tensors={"exp_avg": values(names[parameter], *borders)},
            )
            for parameter, borders in self.ranges().items()
        }

    def owned(self):
        """What it owns of everything, by name."""
        names = self.planner.names(self.stage.chunks)
        return {names[parameter]: borders for parameter, borders in self.ranges().items()}

    def become(self, plan):
        """Deal the layers as the plan says; those that arrive are made here."""
        arriving = {move.layer: Layer(move.layer) for move in plan.moves if move.destination == self.stage.pp_rank}
        self.stage.deal(plan.after, self.stage.layers | arriving)


@pytest.fixture(autouse=True)
def one_tensor_rank(monkeypatch):
    """Without tensor and expert parallelism."""
    for name in ("tensor_model", "expert_model", "expert_tensor"):
        monkeypatch.setattr(shards.parallel_state, f"get_{name}_parallel_rank", lambda: 0)


def plan_of(before, after):
    layouts = [Layout.contiguous(counts, num_stages=2) for counts in (before, after)]
    return Plan(before=layouts[0], after=layouts[1], moves=moves_between(*layouts), reason="test")


PLANS = [
    plan_of([3, 3], [2, 4]),
    plan_of([3, 3], [5, 1]),
    plan_of([2, 1, 1, 2], [1, 1, 2, 2]),
    plan_of([2, 1, 1, 2], [2, 2, 1, 1]),
    plan_of([2, 0, 1, 3], [1, 0, 2, 3]),
]


def ranks_at(layout):
    return [Rank(layout, rank) for rank in range(2 * NUM_REPLICAS)]


def outlines(plan, ranks):
    """What every rank would hold after the plan."""
    leaving = {
        move.layer: describe(export_layer(move.layer, ranks[move.source * NUM_REPLICAS].stage.layers[move.layer], None, None))
        for move in plan.moves
    }
    found = []
    for rank in ranks:
        arriving = {move.layer: leaving[move.layer] for move in plan.moves if move.destination == rank.stage.pp_rank}
        found.append(rank.planner.outline(plan, arriving))
    return found


def of_touched(plan, rank):
    """What a rank of a job that was built at `plan.after` owns of the chunks that the plan changes."""
    chunks = rank.stage.touched(plan.before, plan.after)
    names = set(rank.planner.names(chunks).values())
    return {key: borders for key, borders in rank.owned().items() if key in names}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan.before.counts} to {plan.after.counts}")
class TestPlans:
    def test_what_is_planned_is_what_a_stage_built_that_way_would_own(self, plan):
        built = [of_touched(plan, rank) for rank in ranks_at(plan.after)]
        assert outlines(plan, ranks_at(plan.before)) == built

    def test_looking_ahead_changes_nothing(self, plan):
        ranks = ranks_at(plan.before)
        before = [[[*chunk.block.layers] for chunk in rank.stage.chunks] for rank in ranks]
        outlines(plan, ranks)
        assert [[[*chunk.block.layers] for chunk in rank.stage.chunks] for rank in ranks] == before

    def test_every_shard_comes_together_bit_by_bit(self, plan):
        ranks, wanted = ranks_at(plan.before), outlines(plan, ranks_at(plan.before))
        held = [rank.planner.held(plan) for rank in ranks]
        moves = plan_ranges(
            [{key: (shard.note.start, shard.note.end) for key, shard in shards_here.items()} for shards_here in held], wanted
        )
        facts = {key: shard.note.facts for shards_here in held for key, shard in shards_here.items()}
        for index, rank in enumerate(ranks):
            arrived = {}
            for move in moves:
                if move.destination == index:
                    tensors = {"optimizer:exp_avg": values(move.key, move.start, move.end)}
                    arrived.setdefault(move.key, []).append((move.start, tensors))
            staged = Staged(receipt=EMPTY, ranges=arrived, wanted=wanted[index], facts=facts)
            assembly = Assembly(rank.planner, rank, staged)
            rank.become(plan)
            members = assembly.members(rank.stage.chunks)
            names = rank.planner.names(rank.stage.chunks)
            assert members.keys() >= rank.ranges().keys()
            for parameter, borders in rank.ranges().items():
                state = assembly.assemble(parameter, borders)
                assert torch.equal(state.tensors["exp_avg"], values(names[parameter], *borders))
                assert state.membership == members[parameter] == Membership(0, parameter.numel() % 3)
            assert staged.ranges == {}


class TestNames:
    def test_layers_are_named_by_id_and_the_rest_by_its_place(self):
        rank = Rank(Layout.contiguous([2, 1, 1, 2], num_stages=2), 0)
        keys = list(rank.planner.names(rank.stage.chunks).values())
        assert [(key.unit, key.name) for key in keys] == [
            ("stage 0 chunk 0", "embedding"),
            *((f"layer {layer}", name) for layer in (0, 1, 3) for name in ("weight", "scale", "expert")),
        ]

    def test_parallel_slices_and_copies_are_told_apart(self, monkeypatch):
        ranks = {"tensor_model": 1, "expert_model": 2, "expert_tensor": 3}
        for name, rank in ranks.items():
            monkeypatch.setattr(shards.parallel_state, f"get_{name}_parallel_rank", lambda rank=rank: rank)
        monkeypatch.setattr(
            shards.parallel_state, "get_inter_distributed_optimizer_instance_group", lambda: group(4, 5), raising=False
        )
        stage = Rank(Layout.contiguous([1, 1]), 2).stage
        for num_instances, told in ((1, ""), (2, " instance 4")):
            planner = ShardPlanner(stage, None, num_instances=num_instances)
            coordinates = [key.coordinate for key in planner.names(stage.chunks).values()]
            assert coordinates == [f"tp 1{told}", f"tp 1{told}", f"ep 2 etp 3{told}"]

    def test_a_rank_that_the_plan_does_not_touch_offers_and_wants_nothing(self):
        layouts = [Layout.contiguous(counts, num_stages=2) for counts in ([2, 0, 1, 3], [1, 0, 2, 3])]
        plan = Plan(before=layouts[0], after=layouts[1], moves=(), reason="test")
        rank = Rank(plan.before, 2)
        assert (rank.planner.held(plan), rank.planner.outline(plan, {})) == ({}, {})
