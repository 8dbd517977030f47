"""What past moves cost, and so what the next one will. Kept by the caller of `decide`, which keeps nothing itself."""

import math
from dataclasses import dataclass

ASSUMED_FIXED_SECONDS = 1.0
"""What a move is taken to cost whatever its size, before any was measured."""
ASSUMED_BYTES_PER_SECOND = 1e9
"""How fast a move is taken to be, before any was measured."""
_RECENT_MOVES = 3
"""Measured moves that an estimate looks at: enough to be cautious, few enough to forget a slow first one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveHistory:
    """What past moves cost, to estimate the next. Equal on all ranks if all observe the same numbers."""

    observations: tuple[tuple[int, float], ...] = ()
    """(bytes moved, seconds it took) of each move, oldest first."""

    def observe(self, *, moved_bytes: int, seconds: float) -> "MoveHistory":
        """This history with one more move; raises ValueError for negative numbers."""
        if moved_bytes < 0 or not (math.isfinite(seconds) and seconds >= 0.0):
            raise ValueError(f"MoveHistory: expected bytes and seconds of at least 0, got {moved_bytes} bytes and {seconds} s")
        return MoveHistory(observations=(*self.observations, (moved_bytes, seconds)))

    def estimate(self, moved_bytes: int) -> float:
        """Seconds that moving `moved_bytes` is expected to take.

        Before any move: ASSUMED_FIXED_SECONDS plus the bytes at ASSUMED_BYTES_PER_SECOND. Afterwards that, times the
        largest ratio of measured to assumed among the last three moves: cautious, and larger for more bytes.
        """
        recent = self.observations[-_RECENT_MOVES:]
        ratio = max((seconds / _assumed_seconds(size) for size, seconds in recent), default=1.0)
        return ratio * _assumed_seconds(moved_bytes)


def _assumed_seconds(moved_bytes: int) -> float:
    return ASSUMED_FIXED_SECONDS + moved_bytes / ASSUMED_BYTES_PER_SECOND
