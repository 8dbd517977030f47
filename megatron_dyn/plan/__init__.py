"""The pure planner: splits, predictions and decisions from records alone. Importable without torch or Megatron."""

from megatron_dyn.plan.decide import ASSUMED_BYTES_PER_SECOND, ASSUMED_FIXED_SECONDS, MoveHistory, decide
from megatron_dyn.plan.memory import MemoryBudget, in_flight_microbatches, memory_budget
from megatron_dyn.plan.moves import moves_between
from megatron_dyn.plan.partition import InfeasibleSplit, Split, SplitProblem, best_split
from megatron_dyn.plan.predict import Timeline, bubble_fraction, simulate, stage_costs

__all__ = [
    "ASSUMED_BYTES_PER_SECOND",
    "ASSUMED_FIXED_SECONDS",
    "InfeasibleSplit",
    "MemoryBudget",
    "MoveHistory",
    "Split",
    "SplitProblem",
    "Timeline",
    "best_split",
    "bubble_fraction",
    "decide",
    "in_flight_microbatches",
    "memory_budget",
    "moves_between",
    "simulate",
    "stage_costs",
]
