"""The flags of layer freezing."""

from typing import Any

from megatron_dyn.dynamics.freezing.settings import EmbeddingRule, FrozenState


def add_flags(group: Any) -> None:
    """Add `--dyn-freeze` and its companions to an argparse group."""
    group.add_argument(
        "--dyn-freeze",
        metavar="SPEC",
        help='Freeze layers: a schedule such as {"0-7": [0, 200], "8-15": [50, -1]} (finished steps, start inclusive, end '
        "exclusive, -1 for good), autofreeze[:percentile=50,evaluations=20], or egeria[:interval=10,...]. Default: off.",
    )
    group.add_argument(
        "--dyn-freeze-embedding",
        choices=[rule.value for rule in EmbeddingRule],
        default=EmbeddingRule.WITH_FIRST_LAYER.value,
        help="When the embedding freezes, where the schedule does not name it. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-freeze-state",
        choices=[state.value for state in FrozenState],
        default=FrozenState.DROP.value,
        help="What becomes of the optimizer state of a frozen layer: dropped, or parked in host memory until it trains again. "
        "Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-freeze-cache-gib",
        type=float,
        default=0.0,
        metavar="G",
        help="Host memory of a rank for what its frozen first layers gave; data that comes again skips them. Default: 0 (off).",
    )


def is_on(args: Any) -> bool:
    """Whether the arguments ask for layer freezing."""
    return getattr(args, "dyn_freeze", None) is not None
