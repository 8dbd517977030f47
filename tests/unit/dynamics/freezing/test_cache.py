"""PrefixCache: what comes again is not computed again, and what is not the same is never taken for it."""

import pytest
import torch

from megatron_dyn.dynamics.freezing.cache import PrefixCache


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.num_calls = 0

    def forward(self, hidden_states, attention_mask=None, context=None):
        self.num_calls += 1
        return torch.relu(self.linear(hidden_states)), context


def stack_of(cache, num_layers=3, num_frozen=2, first=0):
    layers = {first + index: Layer() for index in range(num_layers)}
    for layer, module in layers.items():
        cache.wrap(layer, module)
        module.requires_grad_(layer >= num_frozen)
    cache.follow(layers, num_frozen)
    return layers


def run(layers, hidden):
    for module in layers.values():
        hidden, _ = module(hidden_states=hidden, attention_mask=None)
    return hidden


@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_a_micro_batch_that_comes_again_skips_the_frozen_layers_and_gives_the_same(num_frozen):
    cache = PrefixCache(1 << 20)
    layers = stack_of(cache, num_frozen=num_frozen)
    first, second = torch.randn(5, 2, 4), torch.randn(5, 2, 4)
    expected = [run(layers, first), run(layers, second)]
    again = [run(layers, first.clone()), run(layers, second.clone())]
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert [module.num_calls for module in layers.values()] == [2 if layer < num_frozen else 4 for layer in layers]
    assert (cache.num_hits, cache.num_misses) == (2, 2)


def test_what_it_gives_may_be_written_to():
    cache = PrefixCache(1 << 20)
    layers = stack_of(cache, num_layers=1, num_frozen=1)
    hidden = torch.randn(5, 2, 4)
    expected = run(layers, hidden).clone()
    run(layers, hidden).zero_()
    assert torch.equal(run(layers, hidden), expected)


def test_one_bit_makes_another_micro_batch():
    cache = PrefixCache(1 << 20)
    layers = stack_of(cache)
    hidden = torch.zeros(5, 2, 4)
    run(layers, hidden)
    hidden[4, 1, 3] = -0.0
    run(layers, hidden)
    assert (cache.num_hits, cache.num_misses) == (0, 2)


def test_new_frozen_layers_or_layers_elsewhere_forget_everything():
    cache = PrefixCache(1 << 20)
    layers = stack_of(cache)
    hidden = torch.randn(5, 2, 4)
    run(layers, hidden)
    cache.follow(layers, 1)
    run(layers, hidden)
    cache.follow({0: layers[0]}, 1)
    run({0: layers[0]}, hidden)
    assert cache.num_hits == 0
    cache.follow({0: layers[0]}, 1)
    run({0: layers[0]}, hidden)
    assert cache.num_hits == 1


def test_the_least_recently_used_goes_first_and_the_limit_holds():
    one = 5 * 2 * 4 * 4
    cache = PrefixCache(2 * one)
    layers = stack_of(cache)
    batches = [torch.randn(5, 2, 4) for _ in range(3)]
    for index in (0, 1, 0, 2, 0, 1):
        run(layers, batches[index])
    assert (cache.num_hits, cache.num_misses) == (2, 4)


def test_input_that_takes_a_gradient_is_not_cached():
    cache = PrefixCache(1 << 20)
    layers = stack_of(cache)
    hidden = torch.randn(5, 2, 4, requires_grad=True)
    run(layers, hidden)
    run(layers, hidden)
    assert (cache.num_hits, cache.num_misses) == (0, 0)
    assert layers[0].num_calls == 2
