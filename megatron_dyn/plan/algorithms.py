"""All algorithms that split layers over stages, by name, behind one interface: a SplitProblem in, a Split out.

Used by `propose`, the command and the benchmark to compare them on equal terms. What each proves is told in docs/planner.md.
It must not know layouts or schedules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from megatron_dyn.plan.exact.partition import best_split
from megatron_dyn.plan.problem import Split, SplitProblem
from megatron_dyn.plan.rivals.baselines import megatron_account, megatron_uniform, partition, partition_parameters
from megatron_dyn.plan.rivals.deepspeed import deepspeed_balanced, deepspeed_balanced_old, deepspeed_parameters
from megatron_dyn.plan.rivals.diffusion import diffusion, diffusion_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """One way to answer a SplitProblem."""

    name: str
    summary: str
    """What it does, in one line for people."""
    source: str
    """Where it comes from."""
    proved: str
    """What is proved of its answers, and what is not."""
    solve: Callable[[SplitProblem], Split]
    """Pure. Raises InfeasibleSplit when there is no split, NotApplicable when this algorithm cannot answer the problem.

    The baselines (deepspeed-*, megatron-*) look at no memory cap and may leave stages empty, as the originals do.
    """


_PAPER = "DynMo (SC'25), the paper's {} balancer, without the faults of its released code"
_DEEPSPEED = "DeepSpeed, partition_balanced {} pull request 4312, behaviour written anew"

_ALL = (
    Algorithm(
        name="exact",
        summary="the fastest slowest stage, then the fewest bytes moved",
        source="megatron_dyn",
        proved="no split has a faster slowest stage; with virtual stages in small cases, else within the reported bound",
        solve=best_split,
    ),
    Algorithm(
        name="partition",
        summary="binary search on the slowest stage with a greedy probe, by time",
        source=_PAPER.format("centralised"),
        proved="within 1e-9 of the fastest slowest stage for equal speeds without a memory cap, or with empty stages allowed",
        solve=partition,
    ),
    Algorithm(
        name="partition-parameters",
        summary="the same search by parameters",
        source=_PAPER.format("centralised"),
        proved="the same of the most parameters on a stage, ends not counted; nothing of times",
        solve=partition_parameters,
    ),
    Algorithm(
        name="diffusion",
        summary="neighbours hand boundary layers to each other until no pair gains, by time",
        source=_PAPER.format("decentralised"),
        proved="ends, never slower than its start; a local optimum only",
        solve=diffusion,
    ),
    Algorithm(
        name="diffusion-parameters",
        summary="the same by parameters",
        source=_PAPER.format("decentralised"),
        proved="ends, at a local optimum of parameters; nothing of times",
        solve=diffusion_parameters,
    ),
    Algorithm(
        name="deepspeed-parameters",
        summary="DeepSpeed's partition_method 'parameters'",
        source=_DEEPSPEED.format("since"),
        proved="nothing",
        solve=deepspeed_parameters,
    ),
    Algorithm(
        name="deepspeed-balanced",
        summary="DeepSpeed's present balancing function, by time",
        source=_DEEPSPEED.format("since"),
        proved="nothing",
        solve=deepspeed_balanced,
    ),
    Algorithm(
        name="deepspeed-balanced-old",
        summary="DeepSpeed's former balancing function, by time in milliseconds",
        source=_DEEPSPEED.format("before"),
        proved="nothing: near the fastest slowest stage where no layer exceeds the mean stage, ends left aside",
        solve=deepspeed_balanced_old,
    ),
    Algorithm(
        name="megatron-uniform",
        summary="as many layers on every chunk",
        source="Megatron-core without layout flags",
        proved="nothing",
        solve=megatron_uniform,
    ),
    Algorithm(
        name="megatron-account",
        summary="as many layers on every chunk, embedding and loss counted as one each",
        source="Megatron-core, --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split",
        proved="nothing",
        solve=megatron_account,
    ),
)
ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({algorithm.name: algorithm for algorithm in _ALL})
"""By name, in the order in which a comparison shows them."""
