"""When pruning happens and how far it goes: the cubic schedule, a pure function of the step. Knows no torch.

Source: Zhu and Gupta, "To prune, or not to prune: exploring the efficacy of pruning for model compression", arXiv 1710.01878,
equation 1: s_t = s_f + (s_i - s_f) (1 - (t - t_0) / (n dt))^3. Steps here are finished iterations.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The levels of sparsity over a run, valid as `settings` checked them."""

    start: int
    """The finished iteration after which the initial level is in force."""
    end: int
    """The one after which the final level is, whether or not `every` divides the span."""
    every: int
    """Iterations between two levels."""
    initial: float
    final: float

    @property
    def steps(self) -> tuple[int, ...]:
        """Finished iterations after which weights are pruned, ascending; the last one is `end`."""
        steps = [*range(self.start, self.end, self.every), self.end]
        return tuple(step for step in steps if self.level(step) > 0.0)

    def level(self, step: int) -> float:
        """The share of the weights that is to be pruned after `step`: that of the last pruning step by then, or 0."""
        if step < self.start:
            return 0.0
        if step >= self.end:
            # As written, the formula would be exact there only where `every` divides the span.
            return self.final
        passed = (step - self.start) // self.every * self.every
        left = 1.0 - passed / (self.end - self.start)
        return self.final + (self.initial - self.final) * left**3
