"""Shards on their way: named alike on all ranks, planned as Megatron will cut them, and put together bit by bit."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.host import shards
from megatron_dyn.host.layer_state import Trainable
from megatron_dyn.host.optimizer import Membership, ParameterState, ScalarTensor
from megatron_dyn.host.shards import Assembly
from megatron_dyn.migrate import Entry, Key, Manifest, ShardKey, Staged
from megatron_dyn.ports import JobError
from megatron_dyn.records import Receipt

KEY = ShardKey("layer 3", "weight", "tp 0")
SIZE = 24
MAIN, MOMENT = torch.arange(SIZE, dtype=torch.float32) / 7, torch.arange(SIZE).to(torch.bfloat16) / 3
HERE, THERE = Membership(0, 1), Membership(1, 0)
STEP = {"step": ScalarTensor(7.0, "float32", "cpu")}


def pieces_of(*borders, kinds=("main", "optimizer:exp_avg")):
    """(first element, tensors) of some ranges, in memory of their own."""
    whole = {"main": MAIN, "optimizer:exp_avg": MOMENT}
    return [(start, {kind: whole[kind][start:end].clone() for kind in kinds}) for start, end in borders]


def state_of(start, end, *, membership=HERE, group_step=5):
    ((_, tensors),) = pieces_of((start, end))
    return ParameterState(
        membership=membership,
        main=torch.nn.Parameter(tensors["main"]),
        tensors={"exp_avg": tensors["optimizer:exp_avg"]},
        numbers=STEP,
        group_step=group_step,
    )


def assert_is(state, start, end):
    """`state` holds elements `start` to `end`, in every bit."""
    assert torch.equal(state.main, MAIN[start:end])
    assert list(state.tensors) == ["exp_avg"]
    moment = state.tensors["exp_avg"]
    assert moment.dtype is torch.bfloat16
    assert torch.equal(moment, MOMENT[start:end])


class TestJoin:
    @given(data=st.data())
    def test_pieces_in_any_order_that_may_reach_beyond_give_the_whole(self, data):
        start = data.draw(st.integers(0, SIZE - 1))
        end = data.draw(st.integers(start + 1, SIZE))
        cuts = [start, *sorted(data.draw(st.lists(st.integers(start, end), max_size=3))), end]
        borders = list(zip(cuts, cuts[1:], strict=False))
        # The shard that was held before may begin before and end behind what is wanted of it.
        borders[0] = (data.draw(st.integers(0, start)), borders[0][1])
        borders[-1] = (borders[-1][0], data.draw(st.integers(end, SIZE)))
        joined = shards._join(data.draw(st.permutations(pieces_of(*borders))), (start, end))
        assert torch.equal(joined["main"], MAIN[start:end])
        assert torch.equal(joined["optimizer:exp_avg"], MOMENT[start:end])
        assert (joined["main"].dtype, joined["optimizer:exp_avg"].dtype) == (torch.float32, torch.bfloat16)

    def test_pieces_that_have_nothing_of_the_whole_give_its_kinds(self):
        # What this rank held lies elsewhere altogether.
        joined = shards._join(pieces_of((0, 4), (10, 14)), (10, 14))
        assert torch.equal(joined["main"], MAIN[10:14])

    def test_no_tensors_make_none(self):
        assert shards._join([(0, {}), (4, {})], (0, 9)) == {}

    def test_pieces_are_left_as_they_are(self):
        pieces = pieces_of((0, 6), (6, 9))
        joined = shards._join(pieces, (0, 9))
        joined["main"].zero_()
        assert torch.equal(pieces[0][1]["main"], MAIN[:6])


class Rank:
    """A rank that holds `held` of one parameter (None: nothing), wants `wanted` of it, and to which ranges arrived."""

    def __init__(self, held, wanted, *arrived, facts=(THERE, {"step": 1.0}, 9)):
        self.parameter = torch.nn.Parameter(torch.zeros(SIZE, dtype=torch.bfloat16))
        self.states = {} if held is None else {self.parameter: state_of(*held)}
        ranges = {} if held is None else {self.parameter: held}
        self.staged = Staged(
            receipt=Receipt(plan_digest="", sent_layers=(), received_layers=(), sent_bytes=0, received_bytes=0, seconds=0.0),
            ranges={KEY: pieces_of(*arrived)} if arrived else {},
            wanted={} if wanted is None else {KEY: wanted},
            facts={} if facts is None else {KEY: facts},
        )
        # As the editor does it: what is asked for is a list of its own.
        editor = SimpleNamespace(states=lambda: dict(self.states), ranges=lambda: dict(ranges))
        planner = SimpleNamespace(names=lambda chunks: {self.parameter: KEY})
        self.assembly = Assembly(planner, editor, self.staged)

    def members(self):
        return self.assembly.members([])

    def assemble(self, *borders):
        self.members()
        return self.assembly.assemble(self.parameter, borders)


class TestAssembly:
    def test_a_shard_whose_borders_stay_is_the_very_one(self):
        rank = Rank((4, 9), (4, 9))
        assert rank.assemble(4, 9) is rank.states[rank.parameter]

    def test_a_shard_of_a_chunk_that_no_plan_touches_is_the_very_one(self):
        rank = Rank((4, 9), None, facts=None)
        assert rank.assemble(4, 9) is rank.states[rank.parameter]

    @pytest.mark.parametrize(
        ("held", "wanted", "arrived"),
        [
            ((4, 9), (4, 6), []),
            ((4, 9), (2, 12), [(9, 12), (2, 4)]),
            ((4, 9), (7, 15), [(9, 11), (11, 15)]),
            ((4, 9), (15, 20), [(15, 20)]),
        ],
        ids=["smaller", "larger", "shifted", "elsewhere"],
    )
    def test_a_shard_with_other_borders_is_put_together_and_keeps_what_the_rank_knew_of_it(self, held, wanted, arrived):
        state = Rank(held, wanted, *arrived).assemble(*wanted)
        assert_is(state, *wanted)
        assert (state.membership, state.numbers, state.group_step) == (HERE, STEP, 5)
        assert not isinstance(state.main, torch.nn.Parameter)

    def test_a_shard_that_is_new_here_goes_by_what_its_holders_told(self):
        state = Rank(None, (3, 15), (10, 15), (3, 10)).assemble(3, 15)
        assert_is(state, 3, 15)
        assert (state.membership, state.numbers, state.group_step) == (THERE, {"step": 1.0}, 9)

    @pytest.mark.parametrize(
        ("held", "wanted"), [((4, 9), (4, 9)), ((4, 9), None), (None, None)], ids=["planned", "untouched", "unknown"]
    )
    def test_borders_that_megatron_cuts_otherwise_are_refused_with_both(self, held, wanted):
        rank = Rank(held, wanted)
        expected = (4, 9) if held else None
        with pytest.raises(JobError) as raised:
            rank.assemble(4, 10)
        assert str(raised.value) == f"optimizer state of layer 3 weight: planned elements {expected}, Megatron owns (4, 10)"

    def test_what_a_shard_was_made_from_is_freed(self):
        rank = Rank((4, 9), (2, 12), (9, 12), (2, 4))
        live = rank.states[rank.parameter]
        arrived = [tensors["main"] for _, tensors in rank.staged.ranges[KEY]]
        gone = [weakref.ref(tensor) for tensor in (live.main, live.tensors["exp_avg"], *arrived)]
        # As ShardEditor.let_go does.
        rank.states.clear()
        del live, arrived
        state = rank.assemble(2, 12)
        gc.collect()
        assert [reference() for reference in gone] == [None] * 4
        assert_is(state, 2, 12)

    @pytest.mark.parametrize(
        ("rank", "expected"),
        [
            (Rank((4, 9), (4, 9)), HERE),
            (Rank(None, (3, 15), (3, 15)), THERE),
            # Of a chunk that stays as it is, and all of it on other ranks.
            (Rank(None, None, facts=None), None),
        ],
        ids=["held", "new", "on other ranks"],
    )
    def test_members_are_those_whose_group_is_known_here_or_was_told(self, rank, expected):
        assert rank.members() == ({} if expected is None else {rank.parameter: expected})

    def test_fp32_parameters_have_no_main_copy(self):
        rank = Rank(None, (0, 4))
        rank.staged.ranges[KEY] = pieces_of((0, 4), kinds=("optimizer:exp_avg",))
        state = rank.assemble(0, 4)
        assert state.main is None
        assert list(state.tensors) == ["exp_avg"]


class TestShard:
    def test_it_tells_borders_kinds_and_facts_and_gives_the_live_tensors(self):
        state = state_of(4, 9)
        shard = shards._shard(state, (4, 9))
        assert (shard.note.start, shard.note.end) == (4, 9)
        assert shard.note.kinds == (("main", "float32"), ("optimizer:exp_avg", "bfloat16"))
        assert shard.note.facts == (HERE, STEP, 5)
        assert shard.tensors["main"].data_ptr() == state.main.data_ptr()
        assert not shard.tensors["main"].requires_grad
        assert shard.tensors["optimizer:exp_avg"] is state.tensors["exp_avg"]


class TestStandIn:
    def test_it_has_the_trainable_parameters_of_the_layer_in_order_and_no_storage(self):
        entries = (
            Entry(key=Key("parameter", "mlp.weight"), dtype="bfloat16", shape=(2, 3)),
            Entry(key=Key("parameter", "frozen"), dtype="bfloat16", shape=(4,)),
            Entry(key=Key("parameter", "experts.weight"), dtype="float32", shape=(5,)),
            Entry(key=Key("buffer", "mlp.weight"), dtype="float32", shape=(1,)),
        )
        scalars = {"mlp.weight": Trainable(expert=False), "experts.weight": Trainable(expert=True)}
        module, names = shards._stand_in(Manifest(layer=3, entries=entries, scalars=scalars))
        parameters = list(module.parameters())
        assert [names[parameter] for parameter in parameters] == ["mlp.weight", "experts.weight"]
        assert [(parameter.shape, parameter.dtype) for parameter in parameters] == [
            ((2, 3), torch.bfloat16),
            ((5,), torch.float32),
        ]
        assert [parameter.allreduce for parameter in parameters] == [True, False]
        assert all(parameter.is_meta and parameter.requires_grad for parameter in parameters)
