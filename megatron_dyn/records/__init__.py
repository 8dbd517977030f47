"""Frozen records that the stages exchange. Standard library only; importable without torch or Megatron."""

from megatron_dyn.records.layout import Chunk, Layout, LayoutError, even_layout, uniform_layout
from megatron_dyn.records.rounds import (
    NOTABLE_SPEED,
    SCHEMA_VERSION,
    Cost,
    Move,
    NoChange,
    Outcome,
    Plan,
    Rebuilt,
    Receipt,
    RoundReport,
    Sample,
    Snapshot,
    StageReading,
)

__all__ = [
    "Chunk",
    "Cost",
    "Layout",
    "LayoutError",
    "Move",
    "NOTABLE_SPEED",
    "NoChange",
    "Outcome",
    "Plan",
    "Rebuilt",
    "Receipt",
    "RoundReport",
    "SCHEMA_VERSION",
    "Sample",
    "Snapshot",
    "StageReading",
    "even_layout",
    "uniform_layout",
]
