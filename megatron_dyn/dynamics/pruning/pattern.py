"""What is pruned together: single weights, N of M, blocks, or rows. Read from `--dyn-prune-pattern`; knows no torch."""

import re
from dataclasses import dataclass
from enum import StrEnum

from megatron_dyn.config import ConfigError


class Kind(StrEnum):
    """How weights are grouped into units that stay or go together."""

    UNSTRUCTURED = "unstructured"
    """Every weight by itself."""
    N_OF_M = "n-of-m"
    """Of each M neighbours along the input dimension, the N largest stay."""
    BLOCK = "block"
    """Blocks of R outputs by C inputs."""
    ROWS = "rows"
    """Whole rows: all weights of one output."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """`--dyn-prune-pattern`."""

    kind: Kind = Kind.UNSTRUCTURED
    first: int = 1
    """N, or R."""
    second: int = 1
    """M, or C."""

    @classmethod
    def parse(cls, text: str) -> "Pattern":
        """Read `unstructured`, `rows`, `N:M` or `block:RxC`; raises ConfigError."""
        if text in (Kind.UNSTRUCTURED, Kind.ROWS):
            return cls(Kind(text))
        if match := re.fullmatch(r"(\d+):(\d+)", text):
            kept, among = int(match.group(1)), int(match.group(2))
            if 1 <= kept < among:
                return cls(Kind.N_OF_M, kept, among)
        if match := re.fullmatch(r"block:(\d+)x(\d+)", text):
            rows, columns = int(match.group(1)), int(match.group(2))
            if rows >= 1 and columns >= 1:
                return cls(Kind.BLOCK, rows, columns)
        raise ConfigError(f"--dyn-prune-pattern: expected unstructured, rows, N:M with 1 <= N < M, or block:RxC, got {text!r}")

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        match self.kind:
            case Kind.N_OF_M:
                return f"{self.first}:{self.second}"
            case Kind.BLOCK:
                return f"block:{self.first}x{self.second}"
            case _:
                return self.kind.value

    @property
    def highest_level(self) -> float:
        """The share of a weight that the pattern can prune at most."""
        return 1.0 - self.first / self.second if self.kind is Kind.N_OF_M else 1.0

    def objection(self, shape: tuple[int, int]) -> str | None:
        """Why a weight of `shape` (outputs, inputs) cannot be cut into units; None when it can."""
        outputs, inputs = shape
        if self.kind is Kind.N_OF_M and inputs % self.second:
            return f"{inputs} inputs are no multiple of {self.second}"
        if self.kind is Kind.BLOCK and (outputs % self.first or inputs % self.second):
            return f"{outputs}x{inputs} cannot be cut into blocks of {self.first}x{self.second}"
        return None
