"""Times the kernels of pruning by themselves: what each takes at some densities, and what a layer should take of it."""

from functools import cache

import torch

from megatron_dyn.dynamics.pruning.crossover import DENSE, Stopwatch, Times
from megatron_dyn.dynamics.pruning.pattern import Pattern

DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02)
SHAPE = (1024, 256)
NUM_TOKENS = 256
_MICRO_BATCHES = 4
"""Over so many is the refreshing of a kernel's values shared: those of the case."""


@cache
def compact_seconds(outputs: int, inputs: int, density: float, num_tokens: int) -> float:
    """All three products with a weight of which whole outputs are left, by the kernel `compact`, on one thread."""
    name = DENSE if density == 1.0 else "compact"
    return sum(seconds[name] for seconds in _times("rows", (outputs, inputs), density, num_tokens).values())


def kernel_table() -> list[list[str]]:
    """For the page: by pattern and density the milliseconds of all three products by kernel; a header comes first."""
    rows = [["pattern", "density", "dense, ms", "csr, ms", "bsr, ms", "compact, ms"]]
    for pattern in ("unstructured", "block:16x16", "rows"):
        for density in DENSITIES:
            times = _times(pattern, SHAPE, density, NUM_TOKENS)
            names = (DENSE, "csr", "bsr", "compact")
            totals = [
                1e3 * sum(seconds.get(name, seconds[DENSE]) for seconds in times.values())
                if any(name in seconds for seconds in times.values())
                else None
                for name in names
            ]
            rows.append([pattern, f"{density:g}", *("-" if total is None else f"{total:.2f}" for total in totals)])
    return rows


def _times(pattern: str, shape: tuple[int, int], density: float, num_tokens: int) -> Times:
    """Seconds of each product and kernel with a random weight of this density; torch keeps to one thread meanwhile."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        mask = _mask(pattern, shape, density)
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * mask
        return Stopwatch(Pattern.parse(pattern), num_micro_batches=_MICRO_BATCHES).times(weight, mask, num_tokens)
    finally:
        torch.set_num_threads(num_threads)


def _mask(pattern: str, shape: tuple[int, int], density: float) -> torch.Tensor:
    """Exactly so many of the units that the pattern prunes stay, spread at random."""
    height, width = {"rows": (1, shape[1]), "unstructured": (1, 1)}.get(pattern, (16, 16))
    units = torch.zeros(shape[0] // height, shape[1] // width, dtype=torch.bool)
    order = torch.randperm(units.numel(), generator=torch.Generator().manual_seed(0))
    units.view(-1)[order[: max(1, round(density * units.numel()))]] = True
    return units.repeat_interleave(height, 0).repeat_interleave(width, 1)
