"""All settings of the plugin: frozen, keyword-only, validated once. It knows no argparse and no Megatron."""

import math
import re
from dataclasses import dataclass, field, replace
from enum import StrEnum

from megatron_dyn.records import Chunk, Layout, LayoutError


class ConfigError(ValueError):
    """A setting that cannot be honoured. The message names the flag, what was expected and what was found."""


class RebalanceMode(StrEnum):
    """When the job may change its layout by itself."""

    OFF = "off"
    AUTO = "auto"
    EVERY = "every"
    AT = "at"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalancePolicy:
    """`--dyn-rebalance`."""

    mode: RebalanceMode = RebalanceMode.OFF
    """`auto`: whenever a window of samples is full; `every`: every N steps; `at`: after the named steps."""
    every_steps: int = 0
    """The N of `every:N`."""
    at_steps: tuple[int, ...] = ()
    """The N1,N2 of `at:N1,N2`, ascending."""

    def __post_init__(self) -> None:
        """Refuse a mode without its steps; raises ConfigError."""
        if self.mode is RebalanceMode.EVERY and self.every_steps < 1:
            raise ConfigError(f"--dyn-rebalance: expected every:N with N of at least 1, got {self.every_steps}")
        steps = list(self.at_steps)
        if self.mode is RebalanceMode.AT and not (steps and _ascend_from_one(steps)):
            raise ConfigError(f"--dyn-rebalance: expected at: with ascending steps of at least 1, got {steps}")

    @classmethod
    def parse(cls, text: str) -> "RebalancePolicy":
        """Read `off`, `auto`, `every:N` or `at:N1,N2,...`; raises ConfigError."""
        if text in (RebalanceMode.OFF, RebalanceMode.AUTO):
            return cls(mode=RebalanceMode(text))
        if match := re.fullmatch(r"every:(\d+)", text):
            return cls(mode=RebalanceMode.EVERY, every_steps=int(match.group(1)))
        if re.fullmatch(r"at:\d+(,\d+)*", text):
            return cls(mode=RebalanceMode.AT, at_steps=tuple(int(step) for step in text[3:].split(",")))
        raise ConfigError(f"--dyn-rebalance: expected off, auto, every:N or at:N1,N2, got {text!r}")

    @property
    def active(self) -> bool:
        """Whether the layout may change by measurement."""
        return self.mode is not RebalanceMode.OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedLayout:
    """One `N:LAYOUT` of `--dyn-layout-at`: `layout` is in force from the step after `iteration` on."""

    iteration: int
    text: str

    @classmethod
    def parse_all(cls, text: str) -> tuple["ForcedLayout", ...]:
        """Read `N:LAYOUT;M:LAYOUT`; raises ConfigError."""
        forced = []
        for item in text.split(";"):
            match = re.fullmatch(r"\s*(\d+):(\S+)\s*", item)
            if not match:
                raise ConfigError(f"--dyn-layout-at: expected N:LAYOUT, got {item!r}")
            forced.append(cls(iteration=int(match.group(1)), text=match.group(2)))
        iterations = [item.iteration for item in forced]
        if iterations != sorted(set(iterations)):
            raise ConfigError(f"--dyn-layout-at: expected ascending iterations, got {iterations}")
        return tuple(forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureConfig:
    """How often and how long to measure."""

    interval_steps: int = 4
    """`--dyn-profile-interval`: one step in this many is sampled."""
    window_samples: int = 8
    """`--dyn-profile-window`: samples of which the median is taken before a decision; `auto` moves only if each of them
    shows the gain. With eight, costs that alternate between two places look settled once in 128 windows."""
    warmup_steps: int = 2
    """`--dyn-profile-warmup`: steps after start or a move that are never sampled."""


class ShrinkGoal(StrEnum):
    """What fewer stages are wanted for."""

    OFF = "off"
    THROUGHPUT = "throughput"
    EFFICIENCY = "efficiency"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShrinkPolicy:
    """`--dyn-shrink-policy`."""

    goal: ShrinkGoal = ShrinkGoal.OFF
    tolerance: float = 0.0
    """The TOL of `throughput:TOL`: fraction of the tokens per second that may be lost."""

    def __post_init__(self) -> None:
        """Refuse fractions out of range; raises ConfigError."""
        if not 0.0 <= self.tolerance < 1.0:
            raise ConfigError(f"--dyn-shrink-policy: expected a TOL in [0, 1), got {self.tolerance}")

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        return f"{self.goal.value}:{self.tolerance:g}" if self.goal is ShrinkGoal.THROUGHPUT else self.goal.value

    @classmethod
    def parse(cls, text: str) -> "ShrinkPolicy":
        """Read `off`, `throughput:TOL`, `efficiency` or `memory`; raises ConfigError."""
        if text in (ShrinkGoal.OFF, ShrinkGoal.EFFICIENCY, ShrinkGoal.MEMORY):
            return cls(goal=ShrinkGoal(text))
        if match := re.fullmatch(r"throughput:(\d+(?:\.\d*)?|\.\d+)", text):
            return cls(goal=ShrinkGoal.THROUGHPUT, tolerance=float(match.group(1)))
        raise ConfigError(f"--dyn-shrink-policy: expected off, throughput:TOL, efficiency or memory, got {text!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecideConfig:
    """When a better layout is worth a move."""

    min_gain: float = 0.03
    """`--dyn-min-gain`: fraction of the step time that a move must save."""
    horizon_steps: int | None = None
    """`--dyn-horizon-steps`: steps over which the gain must pay for the move; None: the steps left in the run."""
    cooldown_steps: int = 20
    """`--dyn-cooldown-steps`: steps after a move during which `auto` makes no other."""
    allow_empty_stages: bool = False
    """`--dyn-allow-empty-stages`: stages may hold no decoder layer."""
    stage_memory_bytes: int | None = None
    """`--dyn-stage-memory-gib` in bytes: cap on state plus in-flight activations of a stage; None: no cap."""
    cost_changes_at: tuple[int, ...] = ()
    """`--dyn-cost-changes-at`: steps after which layers are known to change their costs, ascending; a move must have paid
    for itself by the next."""
    algorithm: str = "exact"
    """`--dyn-algorithm`: a key of plan.ALGORITHMS."""
    group_size: int | None = None
    """Megatron's `--microbatch-group-size-per-virtual-pipeline-stage`; None: its default. Set by the host."""


class TransportKind(StrEnum):
    """What carries layers between ranks."""

    TORCH = "torch"
    """torch.distributed's point-to-point, on the job's default group on GPUs and on gloo on CPUs."""
    GLOO_COPY = "gloo-copy"
    """Megatron's resharding copy service over gloo, through host memory."""
    NCCL_COPY = "nccl-copy"
    """Megatron's resharding copy service over the default group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynConfig:
    """Everything the user can set. Built from flags by `args.config_from_args`, or by hand."""

    rebalance: RebalancePolicy = field(default_factory=RebalancePolicy)
    """`--dyn-rebalance`."""
    layout_at: tuple[ForcedLayout, ...] = ()
    """`--dyn-layout-at`: wins over `rebalance`."""
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    decide: DecideConfig = field(default_factory=DecideConfig)
    layout_from_checkpoint: bool | None = None
    """`--dyn-layout-from-checkpoint`: None means on unless Megatron's flags say where layers go."""
    exact_grad_norm: bool | None = None
    """`--dyn-exact-grad-norm`: None means on when moves can happen."""
    rng_per_layer: bool = False
    """`--dyn-rng-per-layer`: every layer has random streams of its own, whatever stage it is on."""
    report_dir: str | None = None
    """`--dyn-report-dir`: where rounds.jsonl and losses.jsonl go."""
    record_losses: bool = False
    """`--dyn-record-losses`: write losses.jsonl."""
    timeout_seconds: float = 120.0
    """`--dyn-timeout-seconds`: the longest any wait of a round may take."""
    transport: TransportKind = TransportKind.TORCH
    """`--dyn-transport`: what carries layers between ranks."""
    shrink: ShrinkPolicy = field(default_factory=ShrinkPolicy)
    """`--dyn-shrink-policy`: when a round's report says that fewer stages would do."""
    bucket_bytes: int = 1 << 28
    """`--dyn-migrate-bucket-bytes`: what a rank may have under way at a time during a move."""

    def __post_init__(self) -> None:
        """Refuse values out of range and contradictions; raises ConfigError naming the flag."""
        for flag, value, low in (
            ("--dyn-profile-interval", self.measure.interval_steps, 1),
            ("--dyn-profile-window", self.measure.window_samples, 1),
            ("--dyn-profile-warmup", self.measure.warmup_steps, 0),
            ("--dyn-cooldown-steps", self.decide.cooldown_steps, 0),
            ("--dyn-horizon-steps", self.decide.horizon_steps, 1),
            ("--dyn-stage-memory-gib", self.decide.stage_memory_bytes, 1),
            ("--dyn-migrate-bucket-bytes", self.bucket_bytes, 1),
        ):
            if value is not None and value < low:
                raise ConfigError(f"{flag}: expected at least {low}, got {value}")
        if not 0.0 <= self.decide.min_gain < 1.0:
            raise ConfigError(f"--dyn-min-gain: expected a fraction in [0, 1), got {self.decide.min_gain}")
        changes = list(self.decide.cost_changes_at)
        if not _ascend_from_one(changes):
            raise ConfigError(f"--dyn-cost-changes-at: expected ascending steps of at least 1, got {changes}")
        if not 0.0 < self.timeout_seconds < math.inf:
            raise ConfigError(f"--dyn-timeout-seconds: expected a finite number above 0, got {self.timeout_seconds}")
        if self.record_losses and self.report_dir is None:
            raise ConfigError("--dyn-record-losses: needs --dyn-report-dir, which is not set")

    @property
    def moves_possible(self) -> bool:
        """Whether any step of this run may change the layout."""
        return self.rebalance.active or bool(self.layout_at)

    @property
    def rebalances(self) -> bool:
        """Whether the plugin measures and decides; a forced layout wins over `rebalance`."""
        return self.rebalance.active and not self.layout_at

    @property
    def uses_exact_grad_norm(self) -> bool:
        """The grad-norm choice with its default resolved."""
        return self.moves_possible if self.exact_grad_norm is None else self.exact_grad_norm

    @property
    def active(self) -> bool:
        """Whether anything at all is to be installed; off means absent."""
        return self.moves_possible or self.uses_exact_grad_norm or self.rng_per_layer or self.record_losses

    def forced_layouts(self, *, built: Layout) -> dict[int, Layout]:
        """The forced layouts by iteration, checked against what Megatron builds; raises ConfigError."""
        layouts, num_stages = {}, built.num_stages
        for forced in self.layout_at:
            try:
                layout = Layout.parse(forced.text, num_stages)
                layout.check_num_layers(built.num_layers)
            except LayoutError as error:
                raise ConfigError(f"--dyn-layout-at {forced.iteration}: {error}") from error
            if (objection := self.objection(layout, built=built)) is not None:
                raise ConfigError(f"--dyn-layout-at {forced.iteration}: {objection}")
            layouts[forced.iteration] = layout
        return layouts

    def objection(self, layout: Layout, *, built: Layout) -> str | None:
        """Why a run that stands at `built` cannot go to `layout`; None when it can. For forced and for requested layouts."""
        one = "stage" if built.num_virtual == 1 else "chunk"
        if (layout.num_stages, layout.num_virtual) != (built.num_stages, built.num_virtual):
            return (
                f"expected {len(built.chunks)} stages ({built.num_stages} pipeline stages of {built.num_virtual} chunks), "
                f"got {len(layout.chunks)} in {layout.text!r}"
            )
        if layout.num_layers != built.num_layers:
            return f"expected {built.num_layers} layers, got {layout.num_layers} in {layout.text!r}"
        if _ends(layout) != _ends(built):
            return f"expected E, m and L on the stages of {built.text!r}, got {layout.text!r} (only decoder layers move)"
        if any(chunk.num_mtp for chunk in built.chunks) and layout.last_chunk_with_layers != built.last_chunk_with_layers:
            # With MTP Megatron builds the final norm beside the last decoder layer, and only there.
            return (
                f"with MTP the last decoder layer stays on {one} {built.last_chunk_with_layers} of {built.text!r}, "
                f"got {layout.text!r}"
            )
        emptied = [index for index, count in enumerate(layout.counts) if not count and built.counts[index]]
        if emptied and not self.decide.allow_empty_stages:
            left = f"{layout.text!r} leaves {one} {emptied[0]} without a decoder layer"
            return f"{left}; pass --dyn-allow-empty-stages to allow that"
        return None


def _ascend_from_one(steps: list[int]) -> bool:
    """Whether steps are at least 1, each later than the one before; true of none."""
    return steps == sorted(set(steps)) and min(steps, default=1) >= 1


def _ends(layout: Layout) -> list[Chunk]:
    """What does not move, by chunk."""
    return [replace(chunk, num_layers=0) for chunk in layout.chunks]
