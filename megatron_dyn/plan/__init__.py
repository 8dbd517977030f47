"""The pure planner: splits, predictions and decisions from records alone. Importable without torch or Megatron."""

from megatron_dyn.plan.algorithms import ALGORITHMS, Algorithm
from megatron_dyn.plan.decide import decide, job_of
from megatron_dyn.plan.exact.partition import best_split
from megatron_dyn.plan.exact.refine import refine
from megatron_dyn.plan.history import ASSUMED_BYTES_PER_SECOND, ASSUMED_FIXED_SECONDS, MoveHistory
from megatron_dyn.plan.job import Job, exact_split
from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.moves import moves_between
from megatron_dyn.plan.pipeline.predict import Timeline, bubble_fraction, simulate, step_seconds_of
from megatron_dyn.plan.pipeline.schedule import Op, Phase, in_flight_by_chunk, operations
from megatron_dyn.plan.pipeline.simulator import PipelineRun, Span, peak_activation_bytes, simulate_pipeline
from megatron_dyn.plan.problem import InfeasibleSplit, Split, SplitProblem
from megatron_dyn.plan.proposals import Forecast, Proposal, Refused, compare, forecast, propose
from megatron_dyn.plan.rivals.answers import NotApplicable
from megatron_dyn.plan.shrink import Packing, Packings, Unpackable, advise, choose, first_fit, packings, per_gpu, slowdown
from megatron_dyn.plan.speeds import Observation, SpeedEstimate, SpeedHistory, Verdict, estimate_speeds, verdicts
from megatron_dyn.plan.workload import ChunkTimes, Workload, workload_of

__all__ = [
    "ALGORITHMS",
    "ASSUMED_BYTES_PER_SECOND",
    "ASSUMED_FIXED_SECONDS",
    "Algorithm",
    "ChunkTimes",
    "Forecast",
    "InfeasibleSplit",
    "Job",
    "MemoryBudget",
    "MoveHistory",
    "NotApplicable",
    "Observation",
    "Op",
    "Packing",
    "Packings",
    "Phase",
    "PipelineRun",
    "Proposal",
    "Refused",
    "Span",
    "SpeedEstimate",
    "SpeedHistory",
    "Split",
    "SplitProblem",
    "Timeline",
    "Unpackable",
    "Verdict",
    "Workload",
    "advise",
    "best_split",
    "bubble_fraction",
    "choose",
    "compare",
    "decide",
    "estimate_speeds",
    "exact_split",
    "first_fit",
    "forecast",
    "in_flight_by_chunk",
    "job_of",
    "moves_between",
    "operations",
    "packings",
    "peak_activation_bytes",
    "per_gpu",
    "propose",
    "refine",
    "simulate",
    "simulate_pipeline",
    "slowdown",
    "step_seconds_of",
    "verdicts",
    "workload_of",
]
