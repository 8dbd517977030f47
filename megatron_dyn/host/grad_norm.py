"""A gradient norm that does not depend on how layers are spread over ranks (`--dyn-exact-grad-norm`).

Megatron sums squares per rank and then over ranks, so the last bits of the norm, and through clipping of every parameter,
depend on the layout. With the distributed optimizer a rank even holds flat pieces of parameters whose borders shift when
layers move. Here the squares are added without any rounding that depends on their order or company, after Demmel and Nguyen,
"Fast reproducible floating-point summation" (2013), and Ahrens, Demmel and Nguyen, "Algorithms for efficient reproducible
floating point summation" (2020):

1. All ranks agree on the exponent of the largest gradient (one all-reduce). It fixes two grids, 2**-41 and 2**-83 of the
   largest square possible.
2. Every square (exact in fp64 for fp32, bf16 and fp16) is rounded to the coarse grid, what is left of it to the fine one.
   That concerns one element at a time. A row of 2**12 multiples of a grid has an exact fp64 sum, in whatever order.
3. The sums of the rows are integers. All ranks add them as integers (a second all-reduce) and take the same root of the same
   integer. What the fine grid drops is at most 2**-82 of the sum for an element: 2**-42 for 2**40 elements.

What it takes over, in Megatron 0.19.2: every norm of `megatron.core.optimizer.optimizer`, in the group Megatron passes along
(`grad_stats_parallel_group`): the model-parallel group; with the distributed optimizer the ranks of one optimizer instance;
None for the whole world. Chained dense and expert optimizers share that group with the distributed optimizer: one call for
all gradients. Without it experts have a group of their own, so `ChainedOptimizer` adds the squares of two norms of ours, dense
before expert on every rank: independent of the layout as well. `LayerWiseDistributedOptimizer` and Mimo models sum elsewhere.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron_dyn.host.seams import Seam

_ROW = 1 << 12
"""Elements that one fp64 sum adds: 2**12 of at most 2**41 units each stay within the 2**53 that fp64 holds exactly."""

_UNIT_BITS = 41
"""A square is below 2**41 units of the coarse grid."""

_REST_BITS = _UNIT_BITS + 1
"""Rounding leaves at most half a unit, which is 2**41 units of a grid that is finer by 2**42."""

_CPU_BLOCK, _GPU_BLOCK = 1 << 17, 1 << 21
"""Elements worked on at a time: whole rows, at most 2**9 so that their sum fits into int64. They do not show in the result.

A call needs three fp64 copies of a block: 3 MiB on a CPU, which stay in its cache, 48 MiB on a GPU, for fewer kernels.
"""

_MIN_EXPONENT = -256
"""Taken where the largest gradient is smaller or zero, so that the grids are fp64 numbers; far below what fp32 can hold."""

_INFINITE = 1 << 20
"""Stands in for the exponent of a gradient that is infinite, or so large that its norm is, in fp32."""

_NOT_A_NUMBER = 1 << 21
"""Stands in for the exponent where a gradient is not a number; above `_INFINITE`, since it wins in a sum."""

_LIMB_BITS, _NUM_LIMBS = 32, 5
"""How an integer travels in int64: 160 bits hold 2**83 units of 2**77 gradients, and 2**31 ranks cannot overflow a limb."""


def seam() -> Seam:
    """The ledger row that swaps the norm in."""
    return Seam(
        target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
        why="Megatron's sum order follows the layout; a move would change the last bits of the clip factor",
        remove_when="Megatron's norm is independent of the pipeline layout",
        parameters=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
        wrap=_wrap_grad_norm,
    )


@torch.no_grad()
def exponent_of(grads: Sequence[torch.Tensor]) -> int:
    """The least e with every |gradient| below 2**e, or a stand-in above all of these for infinite and not a number.

    The maximum over ranks is what `sum_squares` and `exact_norm` take. Gradients are of any shape, on any devices; without
    any the answer is the least there is. Waits for the device.
    """
    exponent = _MIN_EXPONENT
    for on_device in _by_device(grads):
        # Not the maximum norm: on the CPU it takes longer than all the rest. These, too, hand on what is not a number.
        extremes = torch.stack([extreme for grad in on_device for extreme in torch.aminmax(grad)])
        exponent = max(exponent, _exponent(float(extremes.abs().max())))
    return exponent


@torch.no_grad()
def sum_squares(grads: Sequence[torch.Tensor], exponent: int) -> int:
    """The sum of the squares in units of 2**(2 * exponent - 83), each rounded to a whole number of them.

    Gradients are finite, of any shape and on any devices, all below 2**exponent in magnitude. As every element is rounded
    by itself, sums add up: that of all pieces on all ranks is that of the whole, whatever the pieces. Waits for the device.
    """
    total = 0
    for on_device in _by_device(grads):
        folded = torch.stack([_fold(block, exponent) for block in _blocks(on_device)])
        total += sum((coarse << _REST_BITS) + fine for coarse, fine in folded.tolist())
    return total


def exact_norm(total: int, exponent: int) -> float:
    """The 2-norm, rounded to fp32, from the sum that `sum_squares` gives with `exponent`, over all ranks.

    Infinite or not a number where `exponent` stands for that; then `total` does not count.
    """
    if exponent >= _INFINITE:
        return math.nan if exponent >= _NOT_A_NUMBER else math.inf
    square = math.ldexp(total, 2 * exponent - _UNIT_BITS - _REST_BITS)
    return float(torch.tensor(math.sqrt(square), dtype=torch.float32))


def _wrap_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_grad_norm_fp32(
        grads_for_norm: list[torch.Tensor] | torch.Tensor,
        norm_type: int | float = 2,
        grad_stats_parallel_group: dist.ProcessGroup | None = None,
    ) -> float | torch.Tensor:
        if float(norm_type) != 2.0:
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        norm = _norm_over_ranks(grads, grad_stats_parallel_group)
        if clip_grads.multi_tensor_scale_tensor_impl is not None:
            # With Transformer Engine the caller expects a tensor, as from the original.
            return torch.tensor([norm], dtype=torch.float32, device=torch.cuda.current_device())
        return norm

    return get_grad_norm_fp32


def _norm_over_ranks(grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> float:
    """The norm of all ranks' gradients. All ranks of `group` must call, also those without any."""
    (exponent,) = _all_reduce([exponent_of(grads)], dist.ReduceOp.MAX, group)
    if exponent >= _INFINITE:
        # Every rank sees the same exponent, so none is left waiting in the second all-reduce.
        return exact_norm(0, exponent)
    total = sum_squares(grads, exponent)
    mask = (1 << _LIMB_BITS) - 1
    limbs = [(total >> _LIMB_BITS * place) & mask for place in range(_NUM_LIMBS)]
    limbs = _all_reduce(limbs, dist.ReduceOp.SUM, group)
    return exact_norm(sum(limb << _LIMB_BITS * place for place, limb in enumerate(limbs)), exponent)


def _all_reduce(values: Sequence[int], op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None) -> list[int]:
    """Reduce integers that fit into int64. All ranks of `group` must call."""
    # Integers, so that neither a backend's order of adding nor what it takes for the maximum of NaN and 1 can matter.
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    reduced = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(reduced, op=op, group=group)
    return [int(value) for value in reduced.tolist()]


def _exponent(largest: float) -> int:
    if math.isnan(largest):
        return _NOT_A_NUMBER
    if largest > torch.finfo(torch.float32).max:
        return _INFINITE
    return math.frexp(max(largest, 2.0**_MIN_EXPONENT))[1]


def _by_device(grads: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The gradients that have elements (an empty one has no extremes), by device: offloaded optimizers have two."""
    devices = {grad.device for grad in grads}
    found = [[grad for grad in grads if grad.device == device and grad.numel()] for device in devices]
    return [on_device for on_device in found if on_device]


def _blocks(grads: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the gradients (some, all on one device) in fp64 as (rows, _ROW), the last row filled up with zeros.

    Small gradients share a block, large ones take several. The caller may overwrite a block, until it asks for the next.
    """
    num_elements = sum(grad.numel() for grad in grads)
    device = grads[0].device
    size = min(_CPU_BLOCK if device.type == "cpu" else _GPU_BLOCK, _full_rows(num_elements))
    block = torch.empty(size, dtype=torch.float64, device=device)
    used = 0
    for grad in grads:
        flat = grad.reshape(-1)
        while flat.numel():
            part, flat = flat[: size - used], flat[size - used :]
            block[used : used + part.numel()].copy_(part)
            used += part.numel()
            if used == size:
                yield block.view(-1, _ROW)
                used = 0
    if used:
        block[used:].zero_()
        yield block[: _full_rows(used)].view(-1, _ROW)


def _full_rows(num_elements: int) -> int:
    return -(-num_elements // _ROW) * _ROW


def _fold(block: torch.Tensor, exponent: int) -> torch.Tensor:
    """Square a block of rows and sum it on the two grids: (coarse, fine) in units of each, int64. Overwrites the block."""
    coarse_unit = 2.0 ** (2 * exponent - _UNIT_BITS)
    squares = block.square_()
    coarse, on_grid = _sum_on_grid(squares, coarse_unit)
    # What is left is exact: it is a multiple of the square's last bit, and no larger than half a unit.
    fine, _ = _sum_on_grid(squares.sub_(on_grid), coarse_unit * 2.0**-_REST_BITS)
    return torch.stack([coarse, fine])


def _sum_on_grid(values: torch.Tensor, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to multiples of `unit`, at most 2**41 of them; return their sum in units, and the multiples themselves."""
    # Near 2**52 * 1.5 units fp64 holds whole units only: adding that rounds, to even in a tie, and taking it away is exact.
    shift = 1.5 * 2.0**52 * unit
    on_grid = (values + shift).sub_(shift)
    return (on_grid.sum(dim=1) / unit).to(torch.int64).sum(), on_grid
