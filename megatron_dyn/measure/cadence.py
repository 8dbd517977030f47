"""When to sample and when a round is due: the rule that a running job and an offline rehearsal share.

Pure functions of step numbers, so that every rank comes to the same answer. It must not know readings, ranks or layouts.
"""

from dataclasses import dataclass

from megatron_dyn.config import MeasureConfig, RebalanceMode, RebalancePolicy
from megatron_dyn.measure.window import is_sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Cadence:
    """The user's policy, asked once before and once after every step, on every rank alike."""

    policy: RebalancePolicy
    measure: MeasureConfig
    cooldown_steps: int
    """Steps after a move during which `auto` starts no round."""

    def wants_sample(self, step: int, *, warm: bool, eager: bool = False) -> bool:
        """Whether step `step` (1-based) is to be measured; `warm` says that the warm-up after the last change is over.

        `auto` samples one step in `interval_steps`, or every step while `eager` (costs are known to have changed a moment
        ago), the other modes the last `window_samples` steps before a round.
        """
        if not self.policy.active or not warm:
            return False
        if self.policy.mode is RebalanceMode.AUTO:
            return eager or is_sampled(step, self.measure.interval_steps)
        upcoming = self._next_scheduled(step)
        return upcoming is not None and upcoming - step < self.measure.window_samples

    def round_due(self, first: int, last: int, *, window_full: bool, steps_since_move: int | None) -> bool:
        """Whether a round belongs to the boundary after step `last`, when steps `first..last` passed since the one before.

        `first` is below `last` when the host skips iterations: a step that was due in between is due now.
        `steps_since_move` is None before the first move.
        """
        if not self.policy.active:
            return False
        if self.policy.mode is RebalanceMode.AUTO:
            cooling_down = steps_since_move is not None and steps_since_move < self.cooldown_steps
            return window_full and not cooling_down
        scheduled = self._next_scheduled(first)
        return scheduled is not None and scheduled <= last

    def _next_scheduled(self, step: int) -> int | None:
        """The first step from `step` on after which the user wants a round; not for `auto`."""
        if self.policy.mode is RebalanceMode.EVERY:
            return -(-step // self.policy.every_steps) * self.policy.every_steps
        return next((at for at in self.policy.at_steps if at >= step), None)
