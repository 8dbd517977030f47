"""The flags of mixture of experts. No torch, no Megatron."""

from typing import Any

from megatron_dyn.dynamics.moe.settings import Assignment, MoeSettings, Routing

_DEFAULTS = MoeSettings()


def add_flags(group: Any) -> None:
    """Add the `--dyn-moe*` flags to an argparse group."""
    group.add_argument(
        "--dyn-moe",
        action="store_true",
        help="Record how tokens spread over the experts of every layer: in dynamics.jsonl, and with the layer times of every "
        "round. Default: off.",
    )
    group.add_argument(
        "--dyn-moe-interval",
        type=int,
        metavar="N",
        help=f"Steps that one line on the loads of the experts covers. Default: {_DEFAULTS.interval_steps}.",
    )
    group.add_argument(
        "--dyn-moe-routing",
        choices=[routing.value for routing in Routing],
        default=_DEFAULTS.routing.value,
        help="Router of all layers with experts: megatron (as Megatron's own flags say), s-base (balanced assignment while "
        "training), loss-free (a bias that follows the loads, no auxiliary loss) or expert-choice (experts take their best "
        "tokens). Default: %(default)s.",
    )
    # None where it was not given: an option without its router is refused, not ignored.
    group.add_argument(
        "--dyn-moe-assignment",
        choices=[assignment.value for assignment in Assignment],
        help="For s-base: sinkhorn (fast, nearly balanced) or auction (slower, every expert gets exactly its share). "
        f"Default: {_DEFAULTS.assignment.value}.",
    )
    group.add_argument(
        "--dyn-moe-bias-rate",
        type=float,
        metavar="F",
        help="For loss-free: what every step adds to the bias of an expert below the mean load, and takes from one above it. "
        f"Default: {_DEFAULTS.bias_rate}.",
    )
    group.add_argument(
        "--dyn-moe-capacity-factor",
        type=float,
        metavar="F",
        help="For expert-choice: how many tokens an expert takes, in units of tokens x top-k / experts. "
        f"Default: {_DEFAULTS.capacity_factor}.",
    )


def is_on(args: Any) -> bool:
    """Whether the family is active: it records, it routes, or was given an option (which it then checks)."""
    options = (args.dyn_moe_interval, args.dyn_moe_assignment, args.dyn_moe_bias_rate, args.dyn_moe_capacity_factor)
    return args.dyn_moe or args.dyn_moe_routing != Routing.MEGATRON or any(option is not None for option in options)
