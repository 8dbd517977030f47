"""What `--dyn-moe*` cannot be had with, as data: each row names Megatron's flag."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.moe.settings import Assignment, MoeSettings, Routing

_OURS = (Routing.S_BASE, Routing.LOSS_FREE, Routing.EXPERT_CHOICE)
_OWN_GATES = (Routing.S_BASE, Routing.EXPERT_CHOICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimit:
    """One flag of Megatron's that some of our routers exclude."""

    flag: str
    why: str
    routings: tuple[Routing, ...]
    """Those that exclude it."""
    used: Callable[[Any], bool]
    """Whether Megatron's validated arguments use it."""


def _set(name: str) -> Callable[[Any], bool]:
    return lambda args: bool(getattr(args, name, None))


def _aux_loss(args: Any) -> bool:
    coefficients = args.moe_aux_loss_coeff
    return any(coefficients) if isinstance(coefficients, list) else bool(coefficients)


LIMITS: tuple[RoutingLimit, ...] = (
    RoutingLimit(
        flag="--moe-aux-loss-coeff", why="an auxiliary loss pulls against the balance it makes", routings=_OURS, used=_aux_loss
    ),
    RoutingLimit(
        flag="--moe-router-load-balancing-type sinkhorn",
        why="one of the two has to assign the tokens",
        routings=_OURS,
        used=lambda args: args.moe_router_load_balancing_type == "sinkhorn",
    ),
    RoutingLimit(
        flag="--moe-router-load-balancing-type quantile_balancing",
        why="one of the two has to assign the tokens",
        routings=_OURS,
        used=lambda args: args.moe_router_load_balancing_type == "quantile_balancing",
    ),
    RoutingLimit(
        flag="--moe-router-enable-expert-bias",
        why="it is another bias on the same selection",
        routings=_OURS,
        used=_set("moe_router_enable_expert_bias"),
    ),
    RoutingLimit(
        flag="--moe-router-fusion", why="the fused kernel selects by itself", routings=_OURS, used=_set("moe_router_fusion")
    ),
    RoutingLimit(
        flag="--moe-enable-routing-replay",
        why="it replays Megatron's selection",
        routings=_OURS,
        used=_set("moe_enable_routing_replay"),
    ),
    RoutingLimit(
        flag="--moe-router-force-load-balancing",
        why="it routes at random",
        routings=_OURS,
        used=_set("moe_router_force_load_balancing"),
    ),
    RoutingLimit(
        flag="--mtp-num-layers",
        why="layers for multi-token prediction keep Megatron's router",
        routings=_OURS,
        used=_set("mtp_num_layers"),
    ),
    RoutingLimit(
        flag="--moe-router-num-groups",
        why="it has no groups of experts",
        routings=_OWN_GATES,
        used=_set("moe_router_num_groups"),
    ),
    RoutingLimit(
        flag="--moe-expert-capacity-factor",
        why="it decides itself what an expert takes",
        routings=_OWN_GATES,
        used=lambda args: args.moe_expert_capacity_factor is not None,
    ),
    RoutingLimit(
        flag="--moe-router-score-function",
        why="its gates are those of its paper",
        routings=_OWN_GATES,
        used=lambda args: args.moe_router_score_function != "softmax",
    ),
    RoutingLimit(
        flag="--moe-router-pre-softmax",
        why="its gates are those of its paper",
        routings=_OWN_GATES,
        used=_set("moe_router_pre_softmax"),
    ),
    RoutingLimit(
        flag="--moe-router-topk-scaling-factor",
        why="its gates are those of its paper",
        routings=_OWN_GATES,
        used=_set("moe_router_topk_scaling_factor"),
    ),
    RoutingLimit(
        flag="--moe-token-dispatcher-type flex",
        why="it takes every token to have top-k experts",
        routings=(Routing.EXPERT_CHOICE,),
        used=lambda args: args.moe_token_dispatcher_type == "flex",
    ),
)


def check_moe(settings: MoeSettings, args: Any) -> None:
    """Raise ConfigError naming the flag for what cannot be had with Megatron's validated arguments."""
    name = "--dyn-moe" if settings.routing is Routing.MEGATRON else f"--dyn-moe-routing {settings.routing.value}"
    if args.num_experts is None:
        raise ConfigError(f"{name}: expected a model with experts (--num-experts), got a dense one")
    if args.moe_router_topk > args.num_experts:
        raise ConfigError(f"--moe-router-topk: expected at most the {args.num_experts} experts, got {args.moe_router_topk}")
    excluded = [limit for limit in LIMITS if settings.routing in limit.routings and limit.used(args)]
    if excluded:
        told = "; ".join(f"{limit.flag} ({limit.why})" for limit in excluded)
        raise ConfigError(f"{name}: cannot be had with {told}; drop one of them")
    if settings.routing is Routing.S_BASE and settings.assignment is Assignment.AUCTION:
        _check_even(args)


def _check_even(args: Any) -> None:
    """An even share has to exist: the tokens that one router sees at a time."""
    cuts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    num_tokens = args.seq_length * args.micro_batch_size // cuts
    if num_tokens % args.num_experts:
        raise ConfigError(
            f"--dyn-moe-assignment auction: expected the tokens of a micro-batch on a rank in multiples of the "
            f"{args.num_experts} experts, got {num_tokens}; take sinkhorn, or another --micro-batch-size"
        )
