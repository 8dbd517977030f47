"""Kernels that multiply with a pruned weight, each for one or more of the three products of a linear layer. Knows no Megatron.

A kernel is made for a pattern of zeros once, and takes the values that the optimizer left when they change. The three:
forward y = x W^T, input gradient dx = dy W, weight gradient dW = dy^T x. x is [tokens, inputs], dy [tokens, outputs].
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

import torch

from megatron_dyn.dynamics.pruning.pattern import Kind, Pattern


class Product(StrEnum):
    """What a linear layer computes in a step."""

    FORWARD = "forward"
    INPUT_GRADIENT = "input_gradient"
    WEIGHT_GRADIENT = "weight_gradient"


class Kernel:
    """One weight in one format. `mask` is bool, [outputs, inputs]; what it hides must be zero in every weight given later."""

    name: str
    products: frozenset[Product]
    """Those it can do; the others must not be asked for."""

    def refresh(self, weight: torch.Tensor) -> None:
        """Take over the weight's values; the pattern stays."""
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, outputs]."""
        raise NotImplementedError

    def input_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """[tokens, inputs]."""
        raise NotImplementedError

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[outputs, inputs]; zero, or anything, where the mask hides the weight."""
        raise NotImplementedError

    def compute(self, product: Product, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The product of that name, of dy, x or both."""
        match product:
            case Product.FORWARD:
                return self.forward(x)
            case Product.INPUT_GRADIENT:
                return self.input_gradient(dy)
            case Product.WEIGHT_GRADIENT:
                return self.weight_gradient(dy, x)


class Csr(Kernel):
    """Compressed rows, through torch's CPU kernels. They know fp32 only: halves are multiplied in fp32 and rounded once."""

    name = "csr"
    products = frozenset(Product)

    def __init__(self, mask: torch.Tensor, wanted: frozenset[Product]) -> None:
        """See Kernel; what only products that are not `wanted` need is not made."""
        self._shape, self._wanted = mask.shape, wanted
        self._ahead, self._places = _csr_pattern(mask)
        if Product.INPUT_GRADIENT in wanted:
            self._back, places_back = _csr_pattern(mask.t())
            rows = mask.shape[0]
            # From the order of the transposed weight to that of the weight: both are gathered from the same dense values.
            self._places_back = places_back % rows * mask.shape[1] + places_back // rows

    def refresh(self, weight: torch.Tensor) -> None:
        """See Kernel."""
        flat = weight.detach().reshape(-1)
        if Product.FORWARD in self._wanted:
            self._ahead.values().copy_(flat[self._places])
        if Product.INPUT_GRADIENT in self._wanted:
            self._back.values().copy_(flat[self._places_back])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return (self._ahead @ x.float().t()).t().to(x.dtype).contiguous()

    def input_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return (self._back @ dy.float().t()).t().to(dy.dtype).contiguous()

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        sampled = torch.sparse.sampled_addmm(self._ahead, dy.float().t(), x.float(), beta=0.0)
        gradient = x.new_zeros(self._shape)
        gradient.view(-1)[self._places] = sampled.values().to(x.dtype)
        return gradient


class Bsr(Kernel):
    """Compressed rows of blocks: square ones on the CPU, in fp32 as `Csr`; halves on a GPU."""

    name = "bsr"
    products = frozenset({Product.FORWARD, Product.INPUT_GRADIENT})

    def __init__(self, mask: torch.Tensor, wanted: frozenset[Product], block: tuple[int, int]) -> None:
        """See Csr; every block of `block` (outputs, inputs) is hidden as a whole or not at all."""
        self._block, self._wanted = block, wanted
        self._dtype: torch.dtype | None = None
        self._where = _cut(mask, block).any(-1).any(-1).nonzero(as_tuple=True)
        self._where_back = _cut(mask.t(), block[::-1]).any(-1).any(-1).nonzero(as_tuple=True)
        self._ahead: torch.Tensor | None = None
        self._back: torch.Tensor | None = None

    def refresh(self, weight: torch.Tensor) -> None:
        """See Kernel."""
        weight = weight.detach() if weight.is_cuda else weight.detach().float()
        self._dtype = weight.dtype
        if Product.FORWARD in self._wanted:
            self._ahead = _bsr(weight, self._block, self._where)
        if Product.INPUT_GRADIENT in self._wanted:
            self._back = _bsr(weight.t(), self._block[::-1], self._where_back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self._times(self._ahead, x)

    def input_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        return self._times(self._back, dy)

    def _times(self, matrix: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        assert matrix is not None, "refresh comes first"
        return (matrix @ x.to(self._dtype).t()).t().to(x.dtype).contiguous()


class Compact(Kernel):
    """The weight without the outputs and inputs that are pruned as a whole: a smaller dense product, at the full gain."""

    name = "compact"
    products = frozenset(Product)

    def __init__(self, mask: torch.Tensor) -> None:
        """See Kernel."""
        self._shape = mask.shape
        self._rows, self._columns = mask.any(1).nonzero().view(-1), mask.any(0).nonzero().view(-1)
        self._weight: torch.Tensor | None = None

    def refresh(self, weight: torch.Tensor) -> None:
        """See Kernel."""
        self._weight = _take(_take(weight.detach(), self._rows, 0), self._columns, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        assert self._weight is not None, "refresh comes first"
        return self._spread(_take(x, self._columns, 1) @ self._weight.t(), self._rows, self._shape[0])

    def input_gradient(self, dy: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        assert self._weight is not None, "refresh comes first"
        return self._spread(_take(dy, self._rows, 1) @ self._weight, self._columns, self._shape[1])

    def weight_gradient(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        small = _take(dy, self._rows, 1).t() @ _take(x, self._columns, 1)
        wide = self._spread(small, self._columns, self._shape[1])
        if len(self._rows) == self._shape[0]:
            return wide
        return wide.new_zeros(self._shape).index_copy_(0, self._rows, wide)

    @staticmethod
    def _spread(product: torch.Tensor, where: torch.Tensor, width: int) -> torch.Tensor:
        """Put the columns of `product` at `where` in a row of `width`, zeros elsewhere."""
        if len(where) == width:
            return product
        return product.new_zeros(product.shape[0], width).index_copy_(1, where, product)


class SemiStructured(Kernel):
    """2 of 4 on a GPU's sparse tensor cores. Its transpose is not 2 of 4, so that it serves the forward product alone."""

    name = "semi-structured"
    products = frozenset({Product.FORWARD})

    def __init__(self) -> None:
        """The mask shows in the weight's zeros."""
        self._weight: torch.Tensor | None = None

    def refresh(self, weight: torch.Tensor) -> None:
        """See Kernel."""
        with _without_beta_warnings():
            self._weight = torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See Kernel."""
        assert self._weight is not None, "refresh comes first"
        return torch.nn.functional.linear(x, self._weight)


Maker = Callable[[frozenset[Product]], Kernel]
"""Makes a kernel, for these products."""


def available(mask: torch.Tensor, pattern: Pattern, dtype: torch.dtype) -> dict[str, Maker]:
    """The kernels that can multiply with a weight of this mask, dtype and device, by name."""
    kernels: dict[str, Maker] = {}
    if not mask.any(1).all() or not mask.any(0).all():
        kernels["compact"] = lambda wanted: Compact(mask)
    half = dtype in (torch.float16, torch.bfloat16)
    if not mask.is_cuda:
        kernels["csr"] = lambda wanted: Csr(mask, wanted)
    if pattern.kind is Kind.BLOCK:
        height, width = pattern.first, pattern.second
        # MKL has square blocks only; torch's GPU kernels want blocks that fill a tensor core.
        powers = height == width and height >= 16 and height & (height - 1) == 0
        if height == width > 1 if not mask.is_cuda else half and powers:
            kernels["bsr"] = lambda wanted: Bsr(mask, wanted, (height, width))
    if pattern.kind is Kind.N_OF_M and (pattern.first, pattern.second) == (2, 4) and mask.is_cuda and half:
        whole = (mask.view(-1, 4).sum(-1) <= 2).all()
        if whole and mask.shape[0] % 32 == 0 and mask.shape[1] % 64 == 0:
            kernels["semi-structured"] = lambda wanted: SemiStructured()
    return kernels


def _csr_pattern(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(fp32 CSR matrix of the mask's pattern, place of each of its values in the row-major matrix)."""
    rows, columns = mask.nonzero(as_tuple=True)
    starts = torch.zeros(mask.shape[0] + 1, dtype=torch.int32, device=mask.device)
    starts[1:] = mask.sum(1).cumsum(0)
    values = torch.zeros(len(rows), dtype=torch.float32, device=mask.device)
    # 32-bit indices are what MKL takes; others are converted at every product.
    with _without_beta_warnings():
        matrix = torch.sparse_csr_tensor(starts, columns.int(), values, mask.shape, check_invariants=False)
    return matrix, rows * mask.shape[1] + columns


def _cut(matrix: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[rows of blocks, blocks in a row, height, width]."""
    rows, columns = matrix.shape
    return matrix.reshape(rows // block[0], block[0], columns // block[1], block[1]).transpose(1, 2)


def _bsr(matrix: torch.Tensor, block: tuple[int, int], where: tuple[torch.Tensor, ...]) -> torch.Tensor:
    block_rows, block_columns = where
    num_rows = matrix.shape[0] // block[0]
    starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=matrix.device)
    starts[1:] = torch.bincount(block_rows, minlength=num_rows).cumsum(0)
    values = _cut(matrix, block)[block_rows, block_columns].contiguous()
    with _without_beta_warnings():
        return torch.sparse_bsr_tensor(starts, block_columns.int(), values, matrix.shape, check_invariants=False)


@contextmanager
def _without_beta_warnings() -> Iterator[None]:
    """Torch says once that compressed formats are in beta, and that 2 of 4 is a prototype: nothing a user could act on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _take(matrix: torch.Tensor, where: torch.Tensor, dimension: int) -> torch.Tensor:
    return matrix if len(where) == matrix.shape[dimension] else matrix.index_select(dimension, where)
