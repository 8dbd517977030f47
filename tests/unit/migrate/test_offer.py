"""Offers: from what ranks tell, every rank makes the same parcels, each between the two ranks that it concerns."""

import pickle
from dataclasses import replace

import pytest
import torch

from megatron_dyn.migrate import (
    Key,
    LayerState,
    Parcel,
    PlanMismatch,
    RangeError,
    RangeMove,
    ShardKey,
    ShardNote,
    describe,
)
from megatron_dyn.migrate.offer import (
    SHARDS,
    Offer,
    all_facts,
    check_same_plan,
    layer_parcels,
    range_moves,
    range_parcels,
)
from megatron_dyn.ports import JobError
from megatron_dyn.testing.fakes import small_layer
from tests.unit.migrate.pipelines import plan_of

KEY, HALF = ShardKey("layer 1", "weight", "tp 0"), ShardKey("layer 1", "bias", "tp 0")
KINDS = (("main", "float32"), ("optimizer:exp_avg", "bfloat16"))
LAYER_SIZES = tuple(tensor.numel() * tensor.element_size() for tensor in small_layer(0).tensors.values())


def offer_of(*layers, pipeline_ranks=(0, 1), **changes):
    manifests = {layer: describe(small_layer(layer)) for layer in layers}
    return Offer(digest="same", problem=None, pipeline_ranks=pipeline_ranks, manifests=manifests, **changes)


def note(start, end, kinds=KINDS, facts=None):
    return ShardNote(start=start, end=end, kinds=kinds, facts=facts)


def test_it_is_plain():
    offer = offer_of(3, notes={KEY: note(0, 4, facts=("group", {"step": 1.0}, None))})
    assert pickle.loads(pickle.dumps(offer)) == offer


class TestSamePlan:
    def test_ranks_with_one_plan_pass(self):
        check_same_plan([offer_of(), offer_of(3)])

    def test_ranks_with_others_are_told_apart_by_digest(self):
        offers = [offer_of(), replace(offer_of(), digest="other"), offer_of()]
        with pytest.raises(PlanMismatch) as raised:
            check_same_plan(offers)
        assert str(raised.value) == "ranks planned differently (digest: ranks): {'same': [0, 2], 'other': [1]}"
        assert isinstance(raised.value, JobError)


class TestLayers:
    def test_each_layer_is_a_parcel_from_the_rank_that_offers_it_to_the_partner_in_its_own_pipeline(self):
        # Two pipelines of two stages; layers 2 and 3 leave stage 0, which is ranks 0 and 1.
        even, odd = (0, 2), (1, 3)
        offers = [
            offer_of(2, 3, pipeline_ranks=even),
            offer_of(2, 3, pipeline_ranks=odd),
            offer_of(pipeline_ranks=even),
            offer_of(pipeline_ranks=odd),
        ]
        assert layer_parcels(plan_of([4, 4], [2, 6]), offers) == [
            (layer, Parcel(unit=f"layer {layer}", source=rank, destination=rank + 2, sizes=LAYER_SIZES))
            for rank in (0, 1)
            for layer in (2, 3)
        ]

    def test_layers_that_come_down_go_from_the_later_stage(self):
        ((layer, parcel),) = layer_parcels(plan_of([3, 5], [4, 4]), [offer_of(), offer_of(3)])
        assert (layer, parcel.source, parcel.destination) == (3, 1, 0)

    def test_a_tensor_without_elements_has_no_part_in_a_parcel(self):
        tensors = {
            Key("buffer", "a"): torch.zeros(0),
            Key("buffer", "b"): torch.zeros(3),
            Key("buffer", "c"): torch.zeros(2, 0),
        }
        manifest = describe(LayerState(layer=3, tensors=tensors))
        ((_, parcel),) = layer_parcels(plan_of([4, 4], [3, 5]), [replace(offer_of(), manifests={3: manifest}), offer_of()])
        assert parcel.sizes == (12,)


class TestRanges:
    def test_moves_follow_from_what_is_told_and_what_is_wanted(self):
        offers = [offer_of(notes={KEY: note(0, 5)}), offer_of(notes={KEY: note(5, 8)})]
        assert range_moves(offers, [{KEY: (0, 3)}, {KEY: (3, 8)}]) == (
            RangeMove(source=0, destination=1, key=KEY, start=3, end=5),
        )

    def test_shards_that_do_not_add_up_are_refused(self):
        with pytest.raises(RangeError, match="elements 5 to 8 are held by no rank"):
            range_moves([offer_of(notes={KEY: note(0, 5)}), offer_of()], [{}, {KEY: (0, 8)}])

    def test_two_ranks_have_one_parcel_with_a_buffer_for_each_kind_of_each_range(self):
        offers = [
            offer_of(notes={KEY: note(0, 6), HALF: note(0, 9, kinds=(("optimizer:exp_avg", "float64"),))}),
            offer_of(notes={KEY: note(6, 9)}),
            offer_of(),
        ]
        moves = range_moves(offers, [{}, {KEY: (0, 9), HALF: (2, 5)}, {KEY: (4, 9)}])
        parcels = range_parcels(moves, offers)
        assert [parcel for parcel, _ in parcels] == [
            Parcel(unit=SHARDS, source=0, destination=1, sizes=(3 * 8, 6 * 4, 6 * 2)),
            Parcel(unit=SHARDS, source=0, destination=2, sizes=(2 * 4, 2 * 2)),
            Parcel(unit=SHARDS, source=1, destination=2, sizes=(3 * 4, 3 * 2)),
        ]
        assert [[(move.key, move.start, move.end) for move in members] for _, members in parcels] == [
            [(HALF, 2, 5), (KEY, 0, 6)],
            [(KEY, 4, 6)],
            [(KEY, 6, 9)],
        ]
        assert [move for _, members in parcels for move in members] == list(moves)

    def test_facts_are_those_of_any_holder(self):
        offers = [offer_of(notes={KEY: note(0, 5, facts="weights")}), offer_of(notes={HALF: note(0, 1, facts="biases")})]
        assert all_facts(offers) == {KEY: "weights", HALF: "biases"}
