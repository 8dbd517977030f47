"""One linear layer's weight with a kernel for each of its three products, and the autograd function that uses them.

Knows no Megatron; `linear` puts it into Megatron's layers, `family` says which kernels.
"""

from collections.abc import Mapping
from typing import Any

import torch

from megatron_dyn.dynamics.pruning.kernels import Kernel, Product, available
from megatron_dyn.dynamics.pruning.pattern import Pattern

Kernels = Mapping[Product, str]
"""The kernel of each product by name; products that are not in it are dense."""


class SparseWeight:
    """Made anew when the mask or the choice changes. What the mask hides must be zero in the weight."""

    def __init__(self, mask: torch.Tensor, pattern: Pattern, dtype: torch.dtype, wanted: Kernels) -> None:
        """Kernels that `wanted` names but that cannot be had here are dense instead."""
        makers = available(mask, pattern, dtype)
        self._kernels: dict[Product, Kernel] = {}
        for name in sorted(set(wanted.values()) & makers.keys()):
            products = frozenset(product for product, its_name in wanted.items() if its_name == name)
            kernel = makers[name](products)
            self._kernels |= dict.fromkeys(sorted(products & kernel.products), kernel)
        self._stale = True

    @property
    def kernels(self) -> dict[str, str]:
        """The kernels really in use, by product; those that are not in it are dense."""
        return {product.value: kernel.name for product, kernel in self._kernels.items()}

    def expire(self) -> None:
        """The weight's values are about to change: take them over again before the next product."""
        self._stale = True

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x W^T for x of [..., inputs], with gradients for both."""
        if self._stale:
            for kernel in {id(kernel): kernel for kernel in self._kernels.values()}.values():
                kernel.refresh(weight)
            self._stale = False
        return _Linear.apply(x, weight, self._kernels)


class _Linear(torch.autograd.Function):
    """x W^T by the kernels chosen. In all of a step the values are the same, so that one copy serves every micro-batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, kernels: Mapping[Product, Kernel]) -> torch.Tensor:
        ctx.kernels, ctx.shape = kernels, x.shape
        flat = x.reshape(-1, x.shape[-1])
        # Under recomputation and with a frozen weight this is what keeps activations from being held for nothing.
        ctx.save_for_backward(flat if ctx.needs_input_grad[1] else None, weight)
        kernel = kernels.get(Product.FORWARD)
        product = flat @ weight.t() if kernel is None else kernel.forward(flat)
        return product.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = gradients[0].reshape(-1, weight.shape[0])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            kernel = ctx.kernels.get(Product.INPUT_GRADIENT)
            dx = (dy @ weight if kernel is None else kernel.input_gradient(dy)).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            kernel = ctx.kernels.get(Product.WEIGHT_GRADIENT)
            dw = dy.t() @ x if kernel is None else kernel.weight_gradient(dy, x)
        return dx, dw, None
