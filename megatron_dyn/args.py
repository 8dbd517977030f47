"""The argparse bridge: `--dyn-*` flags in, DynConfig out. The only place that sees a Namespace of ours."""

import argparse
import math
import re
from collections.abc import Callable
from typing import Any

from megatron_dyn.config import (
    ConfigError,
    DecideConfig,
    DynConfig,
    ForcedLayout,
    MeasureConfig,
    RebalancePolicy,
    ShrinkPolicy,
    TransportKind,
)
from megatron_dyn.dynamics import add_family_flags
from megatron_dyn.plan import ALGORITHMS

GROUP_TITLE = "dynamic balancing (megatron_dyn)"


def add_dyn_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add all `--dyn-*` flags in a group of their own. Usable as Megatron's `extra_args_provider`."""
    group = parser.add_argument_group(GROUP_TITLE)
    group.add_argument(
        "--dyn-device",
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Where to train. auto: CUDA when there is a GPU, else the CPU over gloo.",
    )
    _add_rebalance_args(group)
    _add_measure_args(group)
    add_family_flags(group)
    group.add_argument(
        "--dyn-exact-grad-norm",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Gradient norm and clip factor that do not depend on the layout. Default: on when layers can move, else off.",
    )
    group.add_argument(
        "--dyn-rng-per-layer",
        action="store_true",
        help="Dropout masks that follow the layer, not the stage it runs on: moves are exact with dropout too. Default: off.",
    )
    group.add_argument(
        "--dyn-report-dir", metavar="DIR", help="Write rounds.jsonl (and losses.jsonl) to DIR. Default: console only."
    )
    group.add_argument(
        "--dyn-record-losses",
        action="store_true",
        help="Write losses.jsonl: losses and gradient norm of every step in hex, with the layout in force.",
    )
    group.add_argument(
        "--dyn-transport",
        choices=[kind.value for kind in TransportKind],
        default=DynConfig().transport.value,
        help="What carries layers: torch.distributed, or one of Megatron's resharding copy services. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-migrate-bucket-bytes",
        type=int,
        default=DynConfig().bucket_bytes,
        metavar="N",
        help="The most a rank may have under way at a time while layers move. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-timeout-seconds",
        type=float,
        default=DynConfig().timeout_seconds,
        metavar="S",
        help="The longest any wait of a round may take before the job ends with an error; a whole transfer has to be done by "
        "then, too. Default: %(default)s.",
    )
    return parser


def compose_providers(*providers: Callable[[argparse.ArgumentParser], Any]) -> Callable[..., argparse.ArgumentParser]:
    """One `extra_args_provider` out of several, for scripts that bring flags of their own."""

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for provider in providers:
            provider(parser)
        return parser

    return provide


def config_from_args(args: argparse.Namespace) -> DynConfig:
    """The validated DynConfig of parsed arguments. Raises ConfigError naming the flag."""
    memory_gib = args.dyn_stage_memory_gib
    if memory_gib is not None and not 0.0 < memory_gib < math.inf:
        raise ConfigError(f"--dyn-stage-memory-gib: expected a finite number above 0, got {memory_gib}")
    return DynConfig(
        rebalance=RebalancePolicy.parse(args.dyn_rebalance),
        layout_at=ForcedLayout.parse_all(args.dyn_layout_at) if args.dyn_layout_at is not None else (),
        measure=MeasureConfig(
            interval_steps=args.dyn_profile_interval,
            window_samples=args.dyn_profile_window,
            warmup_steps=args.dyn_profile_warmup,
        ),
        decide=DecideConfig(
            min_gain=args.dyn_min_gain,
            horizon_steps=args.dyn_horizon_steps,
            cooldown_steps=args.dyn_cooldown_steps,
            allow_empty_stages=args.dyn_allow_empty_stages,
            stage_memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
            algorithm=args.dyn_algorithm,
            cost_changes_at=_steps("--dyn-cost-changes-at", args.dyn_cost_changes_at),
        ),
        shrink=ShrinkPolicy.parse(args.dyn_shrink_policy),
        layout_from_checkpoint=args.dyn_layout_from_checkpoint,
        exact_grad_norm=args.dyn_exact_grad_norm,
        rng_per_layer=args.dyn_rng_per_layer,
        report_dir=args.dyn_report_dir,
        record_losses=args.dyn_record_losses,
        timeout_seconds=args.dyn_timeout_seconds,
        transport=TransportKind(args.dyn_transport),
        bucket_bytes=args.dyn_migrate_bucket_bytes,
    )


def _steps(flag: str, text: str | None) -> tuple[int, ...]:
    """Read `N1,N2,...`; raises ConfigError."""
    if text is None:
        return ()
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigError(f"{flag}: expected N1,N2,... (steps), got {text!r}")
    return tuple(int(step) for step in text.split(","))


def _add_rebalance_args(group: Any) -> None:
    group.add_argument(
        "--dyn-rebalance",
        default="off",
        metavar="WHEN",
        help="off, auto (whenever enough was measured), every:N steps, or at:N1,N2 (after those steps). Default: off.",
    )
    group.add_argument(
        "--dyn-layout-at",
        metavar="N:LAYOUT[;M:LAYOUT]",
        help="Force a layout (Megatron's layout syntax) from the step after N on. Wins over --dyn-rebalance.",
    )
    group.add_argument(
        "--dyn-layout-from-checkpoint",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Start at the layout that the checkpoint of --load was written at, if it fits. Default: on unless "
        "--pipeline-model-parallel-layout is given.",
    )
    _add_decide_args(group)


def _add_decide_args(group: Any) -> None:
    decide = DecideConfig()
    group.add_argument(
        "--dyn-algorithm",
        choices=tuple(ALGORITHMS),
        default=decide.algorithm,
        metavar="A",
        help="How layers are split: %(choices)s (docs/planner.md). Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-min-gain",
        type=float,
        default=decide.min_gain,
        metavar="F",
        help="Fraction of the step time that a move must promise to save. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-horizon-steps",
        type=int,
        metavar="N",
        help="Steps over which the gain must pay for the move. Default: the steps left in the run.",
    )
    group.add_argument(
        "--dyn-cooldown-steps",
        type=int,
        default=decide.cooldown_steps,
        metavar="N",
        help="Steps after a move during which auto makes no other. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-allow-empty-stages", action="store_true", help="Let a stage hold no decoder layer. Default: at least one."
    )
    group.add_argument(
        "--dyn-stage-memory-gib",
        type=float,
        metavar="G",
        help="Cap on state plus in-flight activations of any stage, in GiB. Default: none.",
    )
    group.add_argument(
        "--dyn-cost-changes-at",
        metavar="N1,N2",
        help="Steps after which layers are known to change their costs (freezing, pruning): a move must have paid for itself "
        "by the next of them. Default: none known.",
    )
    group.add_argument(
        "--dyn-shrink-policy",
        default="off",
        metavar="P",
        help="Say in the report of a round when fewer stages would do: throughput:TOL (losing at most the fraction TOL of the "
        "tokens per second), efficiency (most tokens per second and GPU) or memory (as few as fit). Nothing is released. "
        "Default: off.",
    )


def _add_measure_args(group: Any) -> None:
    measure = MeasureConfig()
    group.add_argument(
        "--dyn-profile-interval",
        type=int,
        default=measure.interval_steps,
        metavar="N",
        help="Sample one step in N. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-profile-window",
        type=int,
        default=measure.window_samples,
        metavar="N",
        help="Samples whose median a decision rests on. Default: %(default)s.",
    )
    group.add_argument(
        "--dyn-profile-warmup",
        type=int,
        default=measure.warmup_steps,
        metavar="N",
        help="Steps after the start or a move that are not sampled. Default: %(default)s.",
    )
