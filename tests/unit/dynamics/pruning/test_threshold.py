"""The threshold over ranks against torch.topk on the gathered weights: exact counts, ties, replicas, no trace of a layout."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.dynamics.pruning.threshold import Shard, choose
from megatron_dyn.dynamics.pruning.units import GONE, Units
from megatron_dyn.testing.threads import ThreadWorld


def weights_of(seed, *, ties):
    """Magnitudes of four weights by (layer, name, place): few distinct values where ties are wanted."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for layer in range(2):
        for name in ("fc1", "fc2"):
            values = torch.randn(37, generator=generator).abs()
            found[layer, name, (0, 0)] = (values * 3).round() / 3 if ties else values
    return found


def units_like(magnitudes, size=1):
    units = Units(magnitudes.contiguous().view(torch.int32), size)
    return lambda: units


def shards_on(dealt, weights, *, per_layer=False, size=1):
    """The shards of one rank: `dealt` lists (key, whether the rank speaks for it)."""
    return [Shard(key, units_like(weights[key], size), key[0] if per_layer else 0, speaks) for key, speaks in dealt]


def choose_over(deal, weights, budgets, **options):
    """Choose with one thread for each list in `deal`; returns the choice of each rank."""
    world = ThreadWorld(len(deal))

    def body(rank):
        def sum_counts(counts, what):
            return sum(world.meet(rank, counts, what))

        def gather(value, what):
            return world.meet(rank, value, what)

        return choose(shards_on(deal[rank], weights, **options), budgets, sum_counts, gather)

    results = world.run(body)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def joined(choices):
    """What stays by key; replicas must agree."""
    kept = {}
    for choice in choices:
        for key, mask in choice.kept.items():
            assert torch.equal(kept.setdefault(key, mask), mask)
    return [kept[key] for key in sorted(kept)]


def deals(keys):
    """The same weights dealt out in several ways, replicas included."""
    yield [[(key, True) for key in keys]]
    yield [[(key, True)] for key in reversed(keys)]
    yield [[(keys[0], True), (keys[2], True)], [(keys[3], True), (keys[1], True)], []]
    yield [[(key, True) for key in keys], [(key, False) for key in keys]]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 17, 74, 147, 148, 500])
def test_exactly_the_largest_stay_however_they_are_dealt(budget, ties):
    weights = weights_of(3, ties=ties)
    keys = sorted(weights)
    everything = torch.cat([weights[key] for key in keys])
    count = min(budget, len(everything))
    answers = []
    for deal in deals(keys):
        choices = choose_over(deal, weights, [budget])
        kept = torch.cat(joined(choices))
        assert int(kept.sum()) == count
        assert torch.equal(everything[kept].sort().values, everything.topk(count).values.sort().values)
        answers.append(kept)
        thresholds = {choice.thresholds for choice in choices}
        expected = float(everything.topk(count + 1).values[-1]) if count < len(everything) else 0.0
        assert thresholds == {(expected,)}
    assert all(torch.equal(answer, answers[0]) for answer in answers)


def test_ties_stay_in_the_order_of_layer_name_and_index():
    weights = {(layer, name, (0, place)): torch.ones(4) for layer in (0, 1) for name in "ab" for place in (0, 1)}
    (choice,) = choose_over([[(key, True) for key in reversed(sorted(weights))]], weights, [14])
    assert [int(choice.kept[key].sum()) for key in sorted(weights)] == [4, 4, 4, 2, 0, 0, 0, 0]
    assert choice.kept[0, "b", (0, 1)].tolist() == [True, True, False, False]


@given(seed=st.integers(0, 10**6), budgets=st.tuples(st.integers(0, 80), st.integers(0, 80)), ties=st.booleans())
def test_layers_compete_by_themselves(seed, budgets, ties):
    weights = weights_of(seed, ties=ties)
    (choice,) = choose_over([[(key, True) for key in weights]], weights, list(budgets), per_layer=True)
    for layer, budget in enumerate(budgets):
        values = torch.cat([weights[layer, name, (0, 0)] for name in ("fc1", "fc2")])
        kept = torch.cat([choice.kept[layer, name, (0, 0)] for name in ("fc1", "fc2")])
        assert torch.equal(values[kept].sort().values, values.topk(min(budget, 74)).values.sort().values)


def test_what_is_gone_never_stays_and_is_not_counted():
    scores = torch.tensor([5.0, 4.0, 3.0, 2.0]).view(torch.int32).clone()
    scores[1] = GONE
    shard = Shard((0, "w", (0, 0)), lambda: Units(scores, 1), 0, True)
    for budget, expected in [(2, [True, False, True, False]), (9, [True, False, True, True])]:
        kept = choose([shard], [budget], lambda counts, what: counts, lambda value, what: [value]).kept
        assert kept[shard.key].tolist() == expected


def test_units_of_unequal_sizes_stay_until_one_does_not_fit():
    large = Shard((0, "large", (0, 0)), units_like(torch.tensor([4.0, 1.0]), 10), 0, True)
    small = Shard((0, "small", (0, 0)), units_like(torch.tensor([3.0, 2.0, 0.5]), 3), 0, True)
    kept = choose([large, small], [17], lambda counts, what: counts, lambda value, what: [value]).kept
    # 10 + 3 + 3 fit; the next, of ten, does not, and what is smaller must not take its place.
    assert (kept[large.key].tolist(), kept[small.key].tolist()) == ([True, False], [True, True, False])
