"""Choosing by time: the margin, the median over ranks, and that nothing is timed twice. No test depends on real times."""

import torch

from megatron_dyn.dynamics.pruning import crossover
from megatron_dyn.dynamics.pruning.crossover import Stopwatch, fastest
from megatron_dyn.dynamics.pruning.kernels import Csr, Product
from megatron_dyn.dynamics.pruning.pattern import Pattern


def times(**seconds):
    """The same for each product."""
    return dict.fromkeys(Product, seconds)


def test_the_fastest_is_chosen_if_it_beats_dense_by_the_margin():
    assert fastest([times(dense=1.0, csr=0.94)]) == dict.fromkeys(Product, "csr")
    assert fastest([times(dense=1.0, csr=0.96)]) == {}
    assert fastest([times(dense=1.0, csr=0.5, bsr=0.4)]) == dict.fromkeys(Product, "bsr")
    assert fastest([times(dense=1.0)]) == {}


def test_products_are_chosen_apart():
    mixed = {
        Product.FORWARD: {"dense": 1.0, "csr": 0.5},
        Product.INPUT_GRADIENT: {"dense": 1.0, "csr": 2.0},
        Product.WEIGHT_GRADIENT: {"dense": 1.0},
    }
    assert fastest([mixed]) == {Product.FORWARD: "csr"}


def test_the_median_over_ranks_decides_and_every_rank_must_have_the_kernel():
    ranks = [times(dense=1.0, csr=0.1), times(dense=1.0, csr=0.9), times(dense=1.0, csr=9.0)]
    assert fastest(ranks) == dict.fromkeys(Product, "csr")
    assert fastest([times(dense=1.0, compact=0.1), times(dense=1.0)]) == {}


def test_weights_alike_are_timed_once(monkeypatch):
    calls = []

    def fake_seconds(call, like, repetitions=3):
        calls.append(call())
        return 1.0

    monkeypatch.setattr(crossover, "_seconds", fake_seconds)
    watch = Stopwatch(Pattern.parse("unstructured"), num_micro_batches=4)
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(128, 256, generator=generator) < 0.25
    first = watch.times(torch.ones(128, 256) * mask, mask, 10)
    # Refreshing is shared by the micro-batches of a step.
    assert {name: seconds for name, seconds in first[Product.FORWARD].items()} == {"dense": 1.0, "csr": 1.25}
    num_calls = len(calls)
    other = mask.roll(1, 0)
    assert watch.times(torch.ones(128, 256) * other, other, 10) is first
    assert len(calls) == num_calls
    thinner = mask & (torch.rand(128, 256, generator=generator) < 0.5)
    watch.times(torch.ones(128, 256) * thinner, thinner, 10)
    watch.times(torch.ones(128, 256) * mask, mask, 11)
    assert len(calls) == 3 * num_calls


def test_timing_takes_no_random_number():
    before = torch.get_rng_state()
    mask = torch.ones(4, 8, dtype=torch.bool)
    found = Stopwatch(Pattern.parse("unstructured"), num_micro_batches=1).times(torch.ones(4, 8), mask, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(seconds > 0 for by_kernel in found.values() for seconds in by_kernel.values())


def test_a_kernel_that_fails_here_is_not_to_be_had(monkeypatch, caplog):
    def fail(*args):
        raise RuntimeError("not for this shape")

    monkeypatch.setattr(Csr, "input_gradient", fail)
    mask = torch.ones(4, 8, dtype=torch.bool)
    found = Stopwatch(Pattern.parse("unstructured"), num_micro_batches=1).times(torch.ones(4, 8), mask, 3)
    assert {product: set(by_kernel) for product, by_kernel in found.items()} == {
        Product.FORWARD: {"dense", "csr"},
        Product.INPUT_GRADIENT: {"dense"},
        Product.WEIGHT_GRADIENT: {"dense", "csr"},
    }
    assert "no kernel csr for weights of [4, 8]: not for this shape" in caplog.text
