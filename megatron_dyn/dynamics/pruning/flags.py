"""The flags of pruning. All but the switch default to None, so that one given without it can be told from none."""

from typing import Any

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.settings import KernelChoice, Scope, given_options


def add_flags(group: Any) -> None:
    """Add `--dyn-prune` and its options to an argparse group."""
    group.add_argument(
        "--dyn-prune",
        action="store_true",
        help="Prune weights of the decoder layers gradually, by magnitude (docs/dynamics/pruning.md). Default: off.",
    )
    for name, words in (("start", "First"), ("end", "Last")):
        group.add_argument(
            f"--dyn-prune-{name}",
            type=int,
            metavar="N",
            help=f"{words} iteration after which weights are pruned. "
            f"Default: {'10' if name == 'start' else '70'} percent of --train-iters.",
        )
    group.add_argument(
        "--dyn-prune-every",
        type=int,
        metavar="N",
        help="Iterations between two levels. Default: a twentieth of the time from start to end, at least 1.",
    )
    group.add_argument(
        "--dyn-prune-initial", type=float, metavar="S", help="Share of the weights pruned at the start. Default: 0."
    )
    group.add_argument(
        "--dyn-prune-final",
        type=float,
        metavar="S",
        help="Share of the weights pruned at the end, reached exactly. Default: 0.9; with N:M what the pattern prunes.",
    )
    group.add_argument(
        "--dyn-prune-scope",
        choices=[scope.value for scope in Scope],
        help="Whether all weights of the model compete, or those of each layer among themselves. Default: global.",
    )
    group.add_argument(
        "--dyn-prune-pattern",
        metavar="P",
        help="What goes together: unstructured (single weights), N:M (N of M neighbours stay), block:RxC (outputs by inputs) "
        "or rows (whole outputs). Default: unstructured.",
    )
    group.add_argument(
        "--dyn-prune-exclude",
        metavar="NAMES",
        help="Linear layers, or parts of a layer, that stay dense, with commas between: linear_qkv,shared_experts. "
        "Default: none.",
    )
    group.add_argument(
        "--dyn-prune-kernels",
        choices=[choice.value for choice in KernelChoice],
        help="What multiplies with pruned weights: auto (the fastest as measured), dense (Megatron's own products), or one "
        "kernel wherever it can be had. Default: auto.",
    )


def is_on(args: Any) -> bool:
    """Whether the family is active. Raises ConfigError for an option without the switch."""
    on = bool(getattr(args, "dyn_prune", False))
    if not on and (given := given_options(args)):
        raise ConfigError(f"{given[0]}: expected --dyn-prune beside it, got none")
    return on
