"""Every kernel against the dense product with the masked weight: all three products, every pattern, also of nothing at all."""

import pytest
import torch

from megatron_dyn.dynamics.pruning.kernels import Product, available
from megatron_dyn.dynamics.pruning.pattern import Pattern

OUTPUTS, INPUTS, TOKENS = 48, 64, 20


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASKS = {
    "scattered": (Pattern.parse("unstructured"), random(OUTPUTS, INPUTS, seed=1) > 1.0),
    "rows": (Pattern.parse("rows"), (random(OUTPUTS, 1, seed=2) > 0).expand(OUTPUTS, INPUTS).contiguous()),
    "rows and columns": (
        Pattern.parse("unstructured"),
        (random(OUTPUTS, 1, seed=3) > 0) & (random(1, INPUTS, seed=4) > 0),
    ),
    "blocks": (
        Pattern.parse("block:8x8"),
        (random(OUTPUTS // 8, INPUTS // 8, seed=5) > 0.5).repeat_interleave(8, 0).repeat_interleave(8, 1),
    ),
    "nothing": (Pattern.parse("unstructured"), torch.zeros(OUTPUTS, INPUTS, dtype=torch.bool)),
    "everything": (Pattern.parse("unstructured"), torch.ones(OUTPUTS, INPUTS, dtype=torch.bool)),
}
# The kernels add in another order: a few roundings of sums of at most 64 terms of size 1; halves are rounded once, at the end.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 0.13}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", MASKS)
def test_kernels_compute_what_the_dense_product_does(name, dtype):
    pattern, mask = MASKS[name]
    x, dy = random(TOKENS, INPUTS, seed=6).to(dtype), random(TOKENS, OUTPUTS, seed=7).to(dtype)
    makers = available(mask, pattern, dtype)
    assert makers
    for make in makers.values():
        kernel = make(frozenset(Product))
        # Twice: the values of the first time must not linger.
        for seed in (8, 9):
            weight = random(OUTPUTS, INPUTS, seed=seed).to(dtype) * mask
            kernel.refresh(weight)
            expected = {
                Product.FORWARD: x @ weight.t(),
                Product.INPUT_GRADIENT: dy @ weight,
                Product.WEIGHT_GRADIENT: (dy.t() @ x) * mask,
            }
            for product in kernel.products:
                found = kernel.compute(product, dy, x)
                assert (found.dtype, found.is_contiguous()) == (dtype, True), (kernel.name, product)
                found = found * mask if product is Product.WEIGHT_GRADIENT else found
                torch.testing.assert_close(found, expected[product], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scattered", {"csr"}),
        ("everything", {"csr"}),
        ("rows", {"csr", "compact"}),
        ("blocks", {"csr", "bsr"}),
        ("nothing", {"csr", "compact"}),
    ],
)
def test_what_can_be_had_on_a_cpu(name, expected):
    pattern, mask = MASKS[name]
    assert available(mask, pattern, torch.float32).keys() - {"compact"} == expected - {"compact"}
    assert ("compact" in available(mask, pattern, torch.float32)) >= ("compact" in expected)


def test_blocks_that_are_not_square_have_no_kernel_of_their_own():
    mask = torch.ones(8, 8, dtype=torch.bool)
    assert "bsr" not in available(mask, Pattern.parse("block:2x4"), torch.float32)
    assert "bsr" in available(mask, Pattern.parse("block:4x4"), torch.float32)


def test_a_kernel_makes_only_what_is_wanted_of_it():
    pattern, mask = MASKS["scattered"]
    weight = random(OUTPUTS, INPUTS, seed=8) * mask
    ahead = available(mask, pattern, torch.float32)["csr"](frozenset({Product.FORWARD}))
    ahead.refresh(weight)
    assert not hasattr(ahead, "_back")
