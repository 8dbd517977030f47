"""Where a sparse kernel overtakes the dense product: measured on the weights at hand, agreed on by all ranks.

Times differ from run to run, and a kernel of another order of adding gives other last bits: whoever wants two runs to be equal
in every bit names one kernel (docs/dynamics/pruning.md). Knows no Megatron.
"""

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from megatron_dyn.dynamics.pruning.kernels import Product, available
from megatron_dyn.dynamics.pruning.pattern import Pattern

logger = logging.getLogger(__name__)

DENSE = "dense"
MARGIN = 0.95
"""A sparse kernel has to take at most this share of the dense time: within it, noise decides."""

Times = Mapping[Product, Mapping[str, float]]
"""Seconds per micro-batch of every kernel, the dense one included, by product."""


class Stopwatch:
    """Times kernels; what was timed once in this process is not timed again. One per rank."""

    def __init__(self, pattern: Pattern, *, num_micro_batches: int) -> None:
        """Refreshing a kernel's values is shared by the `num_micro_batches` of a step."""
        self._pattern, self._num_micro_batches = pattern, num_micro_batches
        self._known: dict[tuple[object, ...], Times] = {}

    def times(self, weight: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> Times:
        """Seconds of each product with this weight, whose mask is already applied, for `num_tokens` tokens."""
        alike = (weight.shape, weight.dtype, weight.device.type, num_tokens, *_coarse(mask))
        if alike not in self._known:
            self._known[alike] = self._measure(weight.detach(), mask, num_tokens)
        return self._known[alike]

    @torch.no_grad()
    def _measure(self, weight: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> Times:
        x, dy = (_filled(weight, num_tokens, size) for size in (weight.shape[1], weight.shape[0]))
        times: dict[Product, dict[str, float]] = {
            Product.FORWARD: {DENSE: _seconds(lambda: x @ weight.t(), weight)},
            Product.INPUT_GRADIENT: {DENSE: _seconds(lambda: dy @ weight, weight)},
            Product.WEIGHT_GRADIENT: {DENSE: _seconds(lambda: dy.t() @ x, weight)},
        }
        for name, make in available(mask, self._pattern, weight.dtype).items():
            for product in Product:
                kernel = make(frozenset({product}))
                if product not in kernel.products:
                    continue
                try:
                    refresh = _seconds(partial(kernel.refresh, weight), weight)
                    compute = _seconds(partial(kernel.compute, product, dy, x), weight)
                except RuntimeError as error:
                    # Torch's sparse kernels have limits of their own, by device and release: then it is not to be had here.
                    logger.warning("%s: no kernel %s for weights of %s: %s", product, name, list(weight.shape), error)
                    continue
                times[product][name] = compute + refresh / self._num_micro_batches
        return times


def fastest(times: Sequence[Times]) -> dict[Product, str]:
    """The kernel for each product by the median over the ranks; products for which the dense one is best are left out."""
    chosen = {}
    for product in Product:
        lists: dict[str, list[float]] = {}
        for each in times:
            for name, seconds in each[product].items():
                lists.setdefault(name, []).append(seconds)
        # One that some rank cannot have is dense there: what it would save on the others counts for nothing.
        medians = {name: statistics.median(found) for name, found in lists.items() if len(found) == len(times)}
        best = min(medians, key=lambda name: (medians[name], name))
        if best != DENSE and medians[best] <= MARGIN * medians[DENSE]:
            chosen[product] = best
    return chosen


def _coarse(mask: torch.Tensor) -> tuple[int, ...]:
    """What of a mask decides over speed: whole outputs and inputs to a 64th, the density to an eighth of a power of two."""
    rows, columns = int(mask.any(1).sum()), int(mask.any(0).sum())
    return (rows * 64 // mask.shape[0], columns * 64 // mask.shape[1], _eighths(int(mask.sum()), mask.numel()))


def _eighths(part: int, whole: int) -> int:
    return -1 if part == 0 else int(8 * math.log2(whole / part))


def _filled(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Any values will do but zeros and denormals, and no random number of the job may be taken."""
    return torch.full((rows, columns), 0.5, dtype=weight.dtype, device=weight.device)


def _seconds(call: Callable[[], object], like: torch.Tensor, repetitions: int = 3) -> float:
    """The best of a few after a first one, which may set things up."""
    best = float("inf")
    for repetition in range(repetitions + 1):
        _settle(like)
        started = time.perf_counter()
        call()
        _settle(like)
        if repetition:
            best = min(best, time.perf_counter() - started)
    return best


def _settle(like: torch.Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
