"""What `--dyn-moe*` may say, validated. No torch, no Megatron."""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from megatron_dyn.config import ConfigError


class Routing(StrEnum):
    """Who gives tokens to experts."""

    MEGATRON = "megatron"
    """Megatron's router, as its own flags say."""
    S_BASE = "s-base"
    """Balanced assignment while training (BASE, S-BASE)."""
    LOSS_FREE = "loss-free"
    """Top-k with a bias that follows the loads, without an auxiliary loss."""
    EXPERT_CHOICE = "expert-choice"
    """Experts take their best tokens."""


class Assignment(StrEnum):
    """How s-base finds a balanced assignment."""

    SINKHORN = "sinkhorn"
    """Fast, balanced nearly."""
    AUCTION = "auction"
    """Slower, every expert gets exactly its share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSettings:
    """One run's. Raises ConfigError naming the flag."""

    record: bool = False
    """Count the tokens of every expert, and report them."""
    routing: Routing = Routing.MEGATRON
    """The router of every layer with experts."""
    assignment: Assignment = Assignment.SINKHORN
    """For s-base."""
    bias_rate: float = 1e-3
    """For loss-free: what a step adds to or takes from the bias of an expert."""
    capacity_factor: float = 1.0
    """For expert-choice: tokens an expert takes, in units of its even share (tokens x top-k / experts)."""
    interval_steps: int = 10
    """Steps between two lines on the loads."""

    def __post_init__(self) -> None:
        for flag, value in (("--dyn-moe-bias-rate", self.bias_rate), ("--dyn-moe-capacity-factor", self.capacity_factor)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"{flag}: expected a finite number above 0, got {value}")
        if self.interval_steps < 1:
            raise ConfigError(f"--dyn-moe-interval: expected at least 1 step, got {self.interval_steps}")


def settings_from_args(args: Any) -> MoeSettings:
    """The settings that the arguments give. Raises ConfigError, also for an option that has nothing to act on."""
    routing = Routing(args.dyn_moe_routing)
    options = (
        ("assignment", args.dyn_moe_assignment, routing is Routing.S_BASE, "--dyn-moe-routing s-base"),
        ("bias_rate", args.dyn_moe_bias_rate, routing is Routing.LOSS_FREE, "--dyn-moe-routing loss-free"),
        ("capacity_factor", args.dyn_moe_capacity_factor, routing is Routing.EXPERT_CHOICE, "--dyn-moe-routing expert-choice"),
        ("interval_steps", args.dyn_moe_interval, args.dyn_moe, "--dyn-moe"),
    )
    given: dict[str, Any] = {}
    for name, value, applies, needed in options:
        if value is None:
            continue
        if not applies:
            flag = name.removesuffix("_steps").replace("_", "-")
            raise ConfigError(f"--dyn-moe-{flag} {value}: expected it together with {needed}, got {_told(args)}")
        given[name] = Assignment(value) if name == "assignment" else value
    return MoeSettings(record=args.dyn_moe, routing=routing, **given)


def _told(args: Any) -> str:
    return f"--dyn-moe-routing {args.dyn_moe_routing}" + ("" if args.dyn_moe else " without --dyn-moe")
