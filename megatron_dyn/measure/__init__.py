"""Measure: hooks in, one Sample out per rank, one Snapshot for all. No torch, no Megatron."""

from megatron_dyn.measure.assemble import AssembleError, Footprint, Position, assemble, make_sample
from megatron_dyn.measure.cadence import Cadence
from megatron_dyn.measure.recorder import IDLE, Kind, Recorder, Slot, StepReading
from megatron_dyn.measure.window import StepTimes, Window, is_sampled

__all__ = [
    "AssembleError",
    "Cadence",
    "Footprint",
    "IDLE",
    "Kind",
    "Position",
    "Recorder",
    "Slot",
    "StepReading",
    "StepTimes",
    "Window",
    "assemble",
    "is_sampled",
    "make_sample",
]
