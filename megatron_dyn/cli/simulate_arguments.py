"""The flags of `megatron-dyn simulate`. It knows no costs and no results."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

import shtab

from megatron_dyn.cli.arguments import (
    MAX_LAYERS,
    MAX_MICROBATCHES,
    MAX_STAGES,
    MAX_STEPS,
    count,
    fraction,
    positive_int,
    positive_number,
    up_to,
)
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.workloads import DEFAULT_MICROBATCHES, KINDS
from megatron_dyn.config import DecideConfig, MeasureConfig
from megatron_dyn.plan.algorithms import ALGORITHMS

_COSTS = ("timing", "layers")
_RUN = ("pp", "layout", "steps", "micro_batches")
_LIMITS = ("memory_gib", "allow_empty_stages", "algorithm")
_GAIN = ("min_gain", "horizon_steps")
_ROUNDS = ("write_trace", "rebalance", "cooldown_steps", "profile_interval", "profile_window", "profile_warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """One thing that `simulate` plays through."""

    title: str
    """How users ask for it."""
    flags: tuple[str, ...]
    """What it takes, as argparse calls them; `--json` is taken by all."""


MODES: Mapping[str, Mode] = {
    "trace": Mode(title="TRACE", flags=(*_RUN, *_LIMITS, *_GAIN, *_ROUNDS)),
    "kind": Mode(title="--kind", flags=("seed", *_COSTS, *_RUN, *_LIMITS, *_GAIN, *_ROUNDS)),
    "freeze_schedule": Mode(title="--freeze-schedule", flags=("train_embedding", *_COSTS, *_RUN, *_LIMITS, *_GAIN)),
    "resize": Mode(
        title="--resize",
        flags=("sizes", "global_batch", "micro_batch_size", "gpus_per_node", *_COSTS, *_LIMITS),
    ),
}
"""By the argument that asks for it."""


def check_used(args: argparse.Namespace, mode: str) -> None:
    """Raise InputError for a flag that `mode`, a key of MODES, would not look at; one with its default's value says nothing."""
    parser = argparse.ArgumentParser()
    add_simulate_arguments(parser)
    used = MODES[mode]
    for name, default in vars(parser.parse_args([])).items():
        value = getattr(args, name)
        if name in (mode, "json", *used.flags) or value == default:
            continue
        flag = f"--{name.replace('_', '-')}"
        # A switch has no value to repeat; of a list users wrote the items.
        said = "" if value is True else f" {','.join(map(str, value)) if isinstance(value, tuple) else value}"
        others = " or ".join(other.title for other in MODES.values() if name in other.flags)
        raise InputError(f"{flag}{said}: not with {used.title}, only with {others}")


def add_simulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add them all, in groups."""
    _add_what(parser)
    _add_job(parser)
    _add_policy(parser)
    _add_resize(parser)
    parser.add_argument("--json", action="store_true", help="write JSON and nothing else to stdout")


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what changes")
    trace = group.add_argument("trace", nargs="?", metavar="TRACE", help="trace file: frames of layer costs")
    trace.complete = shtab.FILE  # type: ignore[attr-defined]
    kinds = "; ".join(f"{name}: {kind.summary}" for name, kind in KINDS.items())
    group.add_argument("--kind", choices=list(KINDS), metavar="KIND", help=f"a generated trace. {kinds}".replace("%", "%%"))
    group.add_argument("--seed", type=count, default=0, metavar="S", help="of the generated trace; default: %(default)s")
    written = group.add_argument("--write-trace", metavar="OUT", help="write the trace that is played through")
    written.complete = shtab.FILE  # type: ignore[attr-defined]
    group.add_argument(
        "--freeze-schedule",
        metavar="JSON",
        help='layers, and the steps between which they are frozen (end exclusive; -1: for good): {"0-7": [0, 200]}',
    )
    group.add_argument(
        "--train-embedding", action="store_true", help="the embedding trains while layer 0 is frozen; default: frozen with it"
    )
    group.add_argument("--resize", metavar="TRACE", help="steps and sizes, or a file of them: [{step0,size8},{step100,size4}]")


def _add_job(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the job")
    timing = group.add_argument("--timing", metavar="FILE", help="timing file: what the layers cost when nothing is saved")
    timing.complete = shtab.FILE  # type: ignore[attr-defined]
    group.add_argument("--layers", type=up_to(MAX_LAYERS), metavar="L", help="decoder layers, when no file says")
    group.add_argument("--pp", type=up_to(MAX_STAGES), metavar="P", help="pipeline stages (not with --resize)")
    group.add_argument(
        "--steps", type=up_to(MAX_STEPS), metavar="N", help="iterations of the run; default: as the kind or file has"
    )
    group.add_argument(
        "--micro-batches",
        type=up_to(MAX_MICROBATCHES),
        metavar="M",
        help=f"of a step; default: the file's, else {DEFAULT_MICROBATCHES}",
    )
    group.add_argument(
        "--layout", metavar="CURRENT", help="the layout at the start, in Megatron's syntax; default: an even split"
    )
    group.add_argument("--memory-gib", type=positive_number, metavar="X", help="the most memory that a stage may need")
    group.add_argument("--allow-empty-stages", action="store_true", help="let a stage hold no decoder layer")


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the policy, as the --dyn- flags of a run have it")
    decide, measure = DecideConfig(), MeasureConfig()
    group.add_argument("--rebalance", default="auto", metavar="WHEN", help="off, auto, every:N, at:N1,N2; default: %(default)s")
    group.add_argument(
        "--algorithm",
        choices=list(ALGORITHMS),
        default="exact",
        metavar="A",
        help=f"one of {', '.join(ALGORITHMS)}; default: exact",
    )
    group.add_argument(
        "--min-gain",
        type=fraction,
        default=decide.min_gain,
        metavar="F",
        help="of the step time, to move; default: %(default)s",
    )
    group.add_argument("--horizon-steps", type=positive_int, metavar="N", help="in which a move must pay; default: to the end")
    for flag, kind, default, what in (
        ("--cooldown-steps", count, decide.cooldown_steps, "after a move without another"),
        ("--profile-interval", positive_int, measure.interval_steps, "one step in so many is sampled"),
        ("--profile-window", positive_int, measure.window_samples, "samples that a decision rests on"),
        ("--profile-warmup", count, measure.warmup_steps, "steps after the start or a move that are not sampled"),
    ):
        group.add_argument(flag, type=kind, default=default, metavar="N", help=f"{what}; default: %(default)s")


def _add_resize(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("with --resize")
    group.add_argument("--sizes", metavar="MAP", help="number of GPUs to (pp,tp,dp): 8->(4,1,2),4->(2,1,2); or a file of it")
    group.add_argument("--global-batch", type=positive_int, metavar="B", help="samples of a step, the same at every size")
    group.add_argument(
        "--micro-batch-size",
        type=_sizes,
        metavar="SIZES",
        default=(1,),
        help="samples in a micro-batch; of several, such as 4,8, the largest that fits; default: 1",
    )
    group.add_argument("--gpus-per-node", type=positive_int, default=8, metavar="G", help="default: %(default)s")


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(positive_int(part.strip()) for part in text.split(","))
