"""What the loads of experts say: pure arithmetic on counted tokens. No torch, no Megatron.

Two causes of waiting are told apart here. Within a layer, all expert-parallel ranks wait for the one whose experts got most
tokens; between stages, the pipeline waits for the slowest. The first is a matter of routing, the second of where layers lie.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Tokens of one layer over some steps, of the whole global batch. All counts are sums over micro-batches and ranks."""

    layer: int
    """Global id."""
    tokens_per_expert: tuple[int, ...]
    """Routed (token, expert) pairs by expert."""
    expected_pairs: int
    """Tokens times top-k: what would be routed if nothing were dropped."""
    unrouted_tokens: int
    """Tokens that no expert got."""
    rank_tokens: tuple[int, ...] = ()
    """Rows that the experts of each expert-parallel rank computed, by rank, padding included; empty when not seen."""
    slowest_rank_tokens: int = 0
    """Of every micro-batch the rows of the expert-parallel rank that had most: what all of them waited for."""

    @property
    def dropped(self) -> int:
        """Pairs that a capacity did away with, 0 when there are more than expected."""
        return max(0, self.expected_pairs - sum(self.tokens_per_expert))

    @property
    def entropy(self) -> float:
        """Entropy of the load over the experts, 1 when it is even, 0 when one expert gets everything."""
        total, num_experts = sum(self.tokens_per_expert), len(self.tokens_per_expert)
        if num_experts == 1 or total == 0:
            return 1.0
        shares = [count / total for count in self.tokens_per_expert if count]
        return -sum(share * math.log(share) for share in shares) / math.log(num_experts)

    @property
    def expert_imbalance(self) -> float | None:
        """How much longer the experts of the layer take than if every expert-parallel rank had the mean, micro-batch by
        micro-batch: `1 - 1 / expert_imbalance` of their time is waiting for the slowest rank. None when not seen."""
        total = sum(self.rank_tokens)
        return self.slowest_rank_tokens * len(self.rank_tokens) / total if total else None

    def facts(self) -> dict[str, Any]:
        """JSON-ready, for a line of dynamics.jsonl and for the report of a round (docs/dynamics/moe.md)."""
        return {
            "tokens_per_expert": list(self.tokens_per_expert),
            "dropped": self.dropped,
            "unrouted_tokens": self.unrouted_tokens,
            "entropy": self.entropy,
            "max_over_mean": max_over_mean(self.tokens_per_expert),
            "expert_rank_tokens": list(self.rank_tokens),
            "expert_rank_max_over_mean": max_over_mean(self.rank_tokens),
            "slowest_rank_tokens": self.slowest_rank_tokens,
            "expert_imbalance": self.expert_imbalance,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """Why a step with experts takes longer than an even one."""

    expert_imbalance: float | None
    """Time of all experts over what it would be if their ranks were even; None when no layer told its loads."""
    stage_imbalance: float
    """Time of the slowest stage over the mean of the stages, waiting for slow expert ranks included."""


def max_over_mean(values: Sequence[float]) -> float:
    """The greatest value in units of the mean; 1 for an even, an empty or an all-zero sequence."""
    total = sum(values)
    return max(values) * len(values) / total if total else 1.0


def two_causes(layers: Sequence[Loads], stage_seconds: Sequence[float]) -> Causes:
    """Both causes apart, from the loads of all layers and the busy seconds of each stage."""
    seen = [loads for loads in layers if sum(loads.rank_tokens)]
    mean = sum(sum(loads.rank_tokens) / len(loads.rank_tokens) for loads in seen)
    return Causes(
        expert_imbalance=sum(loads.slowest_rank_tokens for loads in seen) / mean if seen else None,
        stage_imbalance=max_over_mean(stage_seconds),
    )


def causes_of_round(line: Mapping[str, Any]) -> Causes:
    """Both causes apart, from one line of rounds.jsonl. Raises KeyError for a round that was not measured."""
    told = [(entry["layer"], entry["dynamics"]["moe"]) for entry in line["layers"] if "moe" in entry.get("dynamics", {})]
    layers = [
        Loads(
            layer=layer,
            tokens_per_expert=tuple(facts["tokens_per_expert"]),
            expected_pairs=sum(facts["tokens_per_expert"]) + facts["dropped"],
            unrouted_tokens=facts["unrouted_tokens"],
            rank_tokens=tuple(facts["expert_rank_tokens"]),
            slowest_rank_tokens=facts["slowest_rank_tokens"],
        )
        for layer, facts in told
    ]
    return two_causes(layers, [stage["forward_seconds"] + stage["backward_seconds"] for stage in line["stages"]])
