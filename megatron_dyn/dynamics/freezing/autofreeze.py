"""AutoFreeze: freeze the front layers whose gradients have settled. Pure: numbers in, a number of layers out.

Liu, Agarwal, Venkataraman, "AutoFreeze: Automatically Freezing Model Blocks to Accelerate Fine-tuning", 2021, section 4.1: the
gradient norm of each layer is accumulated over an interval; eta_l = |G_{t-1,l} - G_{t,l}| / G_{t-1,l}; layers freeze from the
front as long as eta_l lies below a percentile of the eta of all layers that still train.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dyn.dynamics.freezing.settings import AutoFreezeSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoFreezeState:
    """All that a decision rests on; it goes into checkpoints."""

    num_frozen: int = 0
    """Layers frozen from the front."""
    sums: tuple[float, ...] = ()
    """By layer: gradient norms accumulated since the last evaluation."""
    before: tuple[float, ...] = ()
    """By layer: what had accumulated over the interval before; empty before the first evaluation."""

    def observe(self, norms: Sequence[float]) -> "AutoFreezeState":
        """Add one step's gradient norms by layer; a step that overflowed (fp16) does not count."""
        if not all(math.isfinite(norm) for norm in norms):
            return self
        sums = self.sums or (0.0,) * len(norms)
        return replace(self, sums=tuple(total + norm for total, norm in zip(sums, norms, strict=True)))

    def evaluate(self, percentile: float) -> "AutoFreezeState":
        """Decide at the end of an interval. The last layer never freezes: something has to train."""
        if not self.sums:
            return self
        settled = replace(self, sums=(), before=self.sums)
        if not self.before:
            return settled
        changes = [abs(old - new) / old if old > 0 else math.inf for old, new in zip(self.before, self.sums, strict=True)]
        bar = percentile_of(changes[self.num_frozen :], percentile)
        frozen = self.num_frozen
        while frozen < len(changes) - 1 and changes[frozen] < bar:
            frozen += 1
        return replace(settled, num_frozen=frozen)


def evaluation_due(step: int, num_steps: int, settings: AutoFreezeSettings) -> bool:
    """Whether the boundary after `step` ends an interval of a run of `num_steps`."""
    return step % max(1, num_steps // settings.evaluations) == 0


def percentile_of(values: Sequence[float], percentile: float) -> float:
    """The percentile (0 to 100) of some values, linear between neighbours. ValueError without any."""
    if not values:
        raise ValueError("percentile of no values")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percentile / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    if ordered[high] == ordered[low]:
        return ordered[low]
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
