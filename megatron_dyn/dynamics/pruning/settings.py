"""The settings of pruning, validated once; made from Megatron's arguments. Knows no torch and no argparse."""

import math
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.pattern import Kind, Pattern
from megatron_dyn.dynamics.pruning.schedule import Schedule

NAMES = (
    "experts",
    "linear_fc1",
    "linear_fc2",
    "linear_kv_down_proj",
    "linear_kv_up_proj",
    "linear_proj",
    "linear_q_down_proj",
    "linear_q_proj",
    "linear_q_up_proj",
    "linear_qkv",
    "mlp",
    "self_attention",
    "shared_experts",
)
"""What `--dyn-prune-exclude` may name: linear layers of a decoder layer, and the parts of it that hold them."""


class Scope(StrEnum):
    """Within what weights compete."""

    GLOBAL = "global"
    LAYER = "layer"


class KernelChoice(StrEnum):
    """`--dyn-prune-kernels`: which kernel multiplies with a pruned weight."""

    AUTO = "auto"
    DENSE = "dense"
    CSR = "csr"
    BSR = "bsr"
    COMPACT = "compact"
    SEMI_STRUCTURED = "semi-structured"


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneSettings:
    """Everything `--dyn-prune` was told."""

    schedule: Schedule
    scope: Scope = Scope.GLOBAL
    pattern: Pattern = Pattern()
    exclude: tuple[str, ...] = ()
    kernels: KernelChoice = KernelChoice.AUTO

    def __post_init__(self) -> None:
        """Refuse what cannot be done; raises ConfigError naming the flag."""
        schedule, highest = self.schedule, self.pattern.highest_level
        if not (math.isfinite(schedule.final) and 0.0 < schedule.final < 1.0):
            raise ConfigError(f"--dyn-prune-final: expected a share in (0, 1), got {schedule.final:g}")
        if self.pattern.kind is Kind.N_OF_M and schedule.final != highest:
            raise ConfigError(
                f"--dyn-prune-final: expected {highest:g} with --dyn-prune-pattern {self.pattern.text}, got {schedule.final:g}"
            )
        if not 0.0 <= schedule.initial <= schedule.final:
            raise ConfigError(
                f"--dyn-prune-initial: expected a share in [0, --dyn-prune-final {schedule.final:g}], got {schedule.initial:g}"
            )
        if schedule.start < 0:
            raise ConfigError(f"--dyn-prune-start: expected a step of at least 0, got {schedule.start}")
        if schedule.end <= schedule.start:
            raise ConfigError(f"--dyn-prune-end: expected a step after --dyn-prune-start {schedule.start}, got {schedule.end}")
        if schedule.every < 1:
            raise ConfigError(f"--dyn-prune-every: expected at least 1 step, got {schedule.every}")
        if unknown := sorted(set(self.exclude) - set(NAMES)):
            raise ConfigError(f"--dyn-prune-exclude: expected names out of {', '.join(NAMES)}, got {', '.join(unknown)}")

    @classmethod
    def from_args(cls, args: Any) -> "PruneSettings":
        """Fill in the defaults, which depend on `args.train_iters` and on the pattern. Raises ConfigError."""
        if not args.train_iters:
            raise ConfigError("--dyn-prune: expected --train-iters, got a run whose length is given in samples")
        pattern = Pattern.parse(_given(args, "pattern", Kind.UNSTRUCTURED))
        start = _given(args, "start", args.train_iters // 10)
        end = _given(args, "end", max(start + 1, args.train_iters * 7 // 10))
        if end > args.train_iters:
            raise ConfigError(f"--dyn-prune-end: expected at most --train-iters {args.train_iters}, got {end}")
        return cls(
            schedule=Schedule(
                start=start,
                end=end,
                every=_given(args, "every", max(1, (end - start) // 20)),
                initial=_given(args, "initial", 0.0),
                final=_given(args, "final", pattern.highest_level if pattern.kind is Kind.N_OF_M else 0.9),
            ),
            scope=Scope(_given(args, "scope", Scope.GLOBAL)),
            pattern=pattern,
            exclude=_names(_given(args, "exclude", "")),
            kernels=KernelChoice(_given(args, "kernels", KernelChoice.AUTO)),
        )


OPTIONS = (
    *(field.name for field in fields(Schedule)),
    *(field.name for field in fields(PruneSettings) if field.name != "schedule"),
)
"""The X of every `--dyn-prune-X`."""


def given_options(args: Any) -> list[str]:
    """The options of pruning that `args` give, as flags."""
    return [f"--dyn-prune-{name}" for name in OPTIONS if getattr(args, f"dyn_prune_{name}", None) is not None]


def _given(args: Any, name: str, default: Any) -> Any:
    value = getattr(args, f"dyn_prune_{name}", None)
    return default if value is None else value


def _names(text: str) -> tuple[str, ...]:
    names = (name.strip() for name in text.split(","))
    return tuple(sorted({name for name in names if name}))
