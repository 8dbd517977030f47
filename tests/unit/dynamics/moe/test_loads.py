"""What the loads say, against numbers worked out by hand."""

import json
import math

import pytest

from megatron_dyn.dynamics.moe.loads import Loads, causes_of_round, max_over_mean, two_causes


def loads(layer=0, tokens=(6, 2, 0, 0), **more):
    return Loads(layer=layer, tokens_per_expert=tokens, expected_pairs=10, unrouted_tokens=1, **more)


def test_entropy_is_one_when_even_and_zero_when_one_expert_has_all():
    assert loads(tokens=(2, 2, 2, 2)).entropy == pytest.approx(1.0)
    assert loads(tokens=(8, 0, 0, 0)).entropy == 0.0
    assert loads().entropy == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4))
    assert loads(tokens=(5,)).entropy == loads(tokens=(0, 0)).entropy == 1.0


def test_what_was_dropped_is_what_is_missing_and_never_negative():
    assert loads().dropped == 2
    assert loads(tokens=(9, 9)).dropped == 0


def test_ranks_are_compared_micro_batch_by_micro_batch():
    # Two ranks, two micro-batches: (6, 2) and (2, 6). Even in the sum, but each time one waits for the other.
    told = loads(rank_tokens=(8, 8), slowest_rank_tokens=12)
    assert told.expert_imbalance == 1.5
    assert told.facts()["expert_rank_max_over_mean"] == 1.0
    assert loads().expert_imbalance is None


def test_facts_are_json():
    told = json.loads(json.dumps(loads(rank_tokens=(6, 2), slowest_rank_tokens=6).facts()))
    assert told["tokens_per_expert"] == [6, 2, 0, 0]
    assert (told["dropped"], told["unrouted_tokens"], told["max_over_mean"]) == (2, 1, 3.0)
    assert (told["expert_rank_tokens"], told["expert_imbalance"]) == ([6, 2], 1.5)


def test_max_over_mean_of_nothing_is_even():
    assert max_over_mean([]) == max_over_mean([0, 0]) == 1.0


def test_the_two_causes_are_told_apart():
    even, uneven = (1.0, 1.0), (1.0, 3.0)
    balanced = loads(rank_tokens=(5, 5), slowest_rank_tokens=5)
    skewed = loads(layer=1, rank_tokens=(9, 1), slowest_rank_tokens=9)
    only_stages = two_causes([balanced], uneven)
    assert (only_stages.expert_imbalance, only_stages.stage_imbalance) == (1.0, 1.5)
    only_experts = two_causes([skewed], even)
    assert (only_experts.expert_imbalance, only_experts.stage_imbalance) == (1.8, 1.0)
    # Over several layers by their share of the time: 14 rows waited for, 10 of them needed.
    assert two_causes([balanced, skewed, loads(layer=2)], even).expert_imbalance == 1.4
    assert two_causes([], even).expert_imbalance is None


def test_both_are_read_from_a_line_of_a_round():
    facts = loads(rank_tokens=(9, 1), slowest_rank_tokens=9).facts()
    line = {
        "layers": [{"layer": 0}, {"layer": 1, "dynamics": {"moe": facts}}, {"layer": 2, "dynamics": {"prune": {}}}],
        "stages": [{"forward_seconds": 1.0, "backward_seconds": 1.0}, {"forward_seconds": 2.0, "backward_seconds": 4.0}],
    }
    causes = causes_of_round(line)
    assert (causes.expert_imbalance, causes.stage_imbalance) == (1.8, 1.5)
