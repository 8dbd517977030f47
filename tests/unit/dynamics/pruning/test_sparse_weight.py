"""A weight with sparse products inside autograd, against the dense one: values, gradients, and when values are taken over."""

import pytest
import torch

from megatron_dyn.dynamics.pruning.kernels import Product
from megatron_dyn.dynamics.pruning.pattern import Pattern
from megatron_dyn.dynamics.pruning.sparse_weight import SparseWeight

SCATTERED = Pattern.parse("unstructured")
ALL_CSR = dict.fromkeys(Product, "csr")


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASK = random(24, 16, seed=1) > 0.8


def weight_of(seed, requires_grad=True):
    return (random(24, 16, seed=seed) * MASK).requires_grad_(requires_grad)


@pytest.mark.parametrize("wanted", [{}, ALL_CSR, {Product.INPUT_GRADIENT: "csr"}, {Product.WEIGHT_GRADIENT: "csr"}])
def test_products_and_gradients_are_those_of_the_dense_weight(wanted):
    sparse = SparseWeight(MASK, SCATTERED, torch.float32, wanted)
    assert sparse.kernels == {product.value: name for product, name in wanted.items()}
    x, weight = random(3, 5, 16, seed=2).requires_grad_(), weight_of(3)
    y = sparse.linear(x, weight)
    dy = random(*y.shape, seed=4)
    y.backward(dy)
    dense_x, dense_weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    dense = torch.nn.functional.linear(dense_x, dense_weight)
    dense.backward(dy)
    # fp32 sums of 16 to 24 terms of size 1, in another order.
    torch.testing.assert_close(y, dense, rtol=0, atol=1e-5)
    torch.testing.assert_close(x.grad, dense_x.grad, rtol=0, atol=1e-5)
    torch.testing.assert_close(weight.grad * MASK, dense_weight.grad * MASK, rtol=0, atol=1e-5)


def test_what_cannot_be_had_is_dense():
    sparse = SparseWeight(MASK, SCATTERED, torch.float32, {Product.FORWARD: "bsr", Product.INPUT_GRADIENT: "csr"})
    assert sparse.kernels == {"input_gradient": "csr"}
    x, weight = random(4, 16, seed=2), weight_of(3)
    assert torch.equal(sparse.linear(x, weight), x @ weight.t())


def test_values_are_taken_over_when_they_were_told_to_change():
    sparse = SparseWeight(MASK, SCATTERED, torch.float32, ALL_CSR)
    x, weight = random(4, 16, seed=2), weight_of(3)
    sparse.linear(x, weight)
    with torch.no_grad():
        weight.mul_(2)
    stale = sparse.linear(x, weight)
    sparse.expire()
    fresh = sparse.linear(x, weight)
    torch.testing.assert_close(fresh, 2 * stale, rtol=0, atol=1e-5)
    torch.testing.assert_close(fresh, x @ weight.t(), rtol=0, atol=1e-5)


def test_a_frozen_weight_holds_no_activations():
    sparse = SparseWeight(MASK, SCATTERED, torch.float32, ALL_CSR)
    x, weight = random(4, 16, seed=2).requires_grad_(), weight_of(3, requires_grad=False)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = sparse.linear(x, weight)
    assert [tensor is weight or tensor.data_ptr() == weight.data_ptr() for tensor in packed] == [True]
    y.sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, torch.ones(4, 24) @ weight, rtol=0, atol=1e-5)
