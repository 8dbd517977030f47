"""Pruning on a GPU: scores and masks are those of the CPU, and its kernels compute what the dense product does."""

import pytest
import torch

from megatron_dyn.dynamics.pruning.crossover import Stopwatch
from megatron_dyn.dynamics.pruning.kernels import Product, available
from megatron_dyn.dynamics.pruning.pattern import Pattern
from megatron_dyn.dynamics.pruning.units import mask_of, units_of

pytestmark = pytest.mark.gpu

SHAPE = (256, 512)


def pruned(text, dtype, *, level=0.5):
    """(pattern, weight, mask) on the CPU, the smallest units of the pattern gone."""
    pattern = Pattern.parse(text)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype)
    nothing = torch.ones(SHAPE, dtype=torch.bool)
    scores = units_of(weight, nothing, pattern).scores
    kept = (
        scores > scores.sort().values[int(level * len(scores))] if text != "2:4" else torch.zeros_like(scores, dtype=torch.bool)
    )
    mask = mask_of(kept, weight, nothing, pattern)
    return pattern, weight * mask, mask


@pytest.mark.parametrize("text", ["unstructured", "2:4", "block:16x16", "rows"])
def test_scores_and_masks_are_those_of_the_cpu(text):
    pattern, weight, mask = pruned(text, torch.bfloat16)
    here = units_of(weight, mask, pattern).scores
    there = units_of(weight.cuda(), mask.cuda(), pattern).scores
    assert torch.equal(there.cpu(), here)
    kept = here > here.median()
    assert torch.equal(mask_of(kept.cuda(), weight.cuda(), mask.cuda(), pattern).cpu(), mask_of(kept, weight, mask, pattern))


@pytest.mark.parametrize(("text", "expected"), [("2:4", "semi-structured"), ("block:16x16", "bsr"), ("rows", "compact")])
def test_kernels_compute_what_the_dense_product_does(text, expected):
    pattern, weight, mask = pruned(text, torch.bfloat16)
    weight, mask = weight.cuda(), mask.cuda()
    x = torch.randn(128, SHAPE[1], device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(128, SHAPE[0], device="cuda", dtype=torch.bfloat16)
    kernels = available(mask, pattern, torch.bfloat16)
    assert expected in kernels
    kernel = kernels[expected](frozenset(Product))
    kernel.refresh(weight)
    dense = {Product.FORWARD: x @ weight.t(), Product.INPUT_GRADIENT: dy @ weight, Product.WEIGHT_GRADIENT: dy.t() @ x}
    for product in kernel.products:
        found = kernel.compute(product, dy, x)
        hidden = mask if product is Product.WEIGHT_GRADIENT else torch.ones_like(found, dtype=torch.bool)
        # bf16 keeps 8 bits; sums of 512 terms of size 1 are around 20.
        torch.testing.assert_close(found * hidden, dense[product] * hidden, rtol=2e-2, atol=0.3)


def test_kernels_are_timed_on_the_device():
    pattern, weight, mask = pruned("2:4", torch.bfloat16)
    found = Stopwatch(pattern, num_micro_batches=8).times(weight.cuda(), mask.cuda(), 1024)
    assert all(0 < seconds < 1 for by_kernel in found.values() for seconds in by_kernel.values())
    assert "semi-structured" in found[Product.FORWARD]
