"""The part of `plan` that prices fewer stages: what each size would cost in speed, and which one a policy would take."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_dyn.cli.output import table
from megatron_dyn.config import ShrinkGoal, ShrinkPolicy
from megatron_dyn.plan.job import Job
from megatron_dyn.plan.shrink import Packing, Packings, Unpackable, choose, first_fit, packings, per_gpu, slowdown

ALWAYS_UP_TO = 16
"""Stages up to which sizes are priced without being asked, if none is virtual: for 64 layers that takes 0.2 s here, for 96
layers 0.4 s. On 32 stages 64 layers take 0.8 s, 256 layers several seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizesAnswer:
    """Every smaller size of a job, and the choice of a policy."""

    sizes: Packings
    policy: ShrinkPolicy
    has_current: bool
    """Whether there is a layout of today to compare with."""
    first_fit: tuple[tuple[int, ...], ...] | None
    """Stages that the paper's packing by memory would merge; None without sizes or a cap."""

    @property
    def chosen(self) -> Packing | None:
        """The size that the policy takes; None: stay."""
        return choose(self.sizes, self.policy)


def sizes_of(job: Job, policy: ShrinkPolicy, stage_bytes: Sequence[int] | None) -> SizesAnswer | None:
    """Price all smaller sizes, unless that takes long and no policy asks for it; `stage_bytes`, by pp_rank, if known.

    It takes long with many stages, and with virtual stages, whose splits are simulated one after the other.
    """
    num_stages = job.template.num_stages
    takes_long = num_stages > ALWAYS_UP_TO or job.template.num_virtual > 1
    if num_stages == 1 or (policy.goal is ShrinkGoal.OFF and takes_long):
        return None
    merged = None if stage_bytes is None or job.cap_bytes is None else first_fit(stage_bytes, job.cap_bytes)
    return SizesAnswer(sizes=packings(job), policy=policy, has_current=job.has_current, first_fit=merged)


def sizes_json(answer: SizesAnswer | None) -> dict[str, Any] | None:
    """The answer as plain data; docs/command.md lists the keys."""
    if answer is None:
        return None
    return {
        "policy": answer.policy.text,
        "chosen_num_stages": None if answer.chosen is None else answer.chosen.num_stages,
        "smaller": [_size_json(answer, size) for size in answer.sizes.smaller],
        "first_fit": None if answer.first_fit is None else [list(group) for group in answer.first_fit],
    }


def _size_json(answer: SizesAnswer, size: Packing | Unpackable) -> dict[str, Any]:
    if isinstance(size, Unpackable):
        return {"num_stages": size.num_stages, "refused": size.reason}
    best, today = answer.sizes.best, answer.sizes.today if answer.has_current else None
    return {
        "num_stages": size.num_stages,
        "layout": size.layout.text,
        "bottleneck_seconds": size.bottleneck_seconds,
        "step_seconds": size.step_seconds,
        "longer_than_best": slowdown(size, best),
        "longer_than_today": None if today is None else slowdown(size, today),
        "per_gpu_of_best": per_gpu(size, best),
        "per_gpu_of_today": None if today is None else per_gpu(size, today),
    }


def sizes_lines(answer: SizesAnswer) -> list[str]:
    """What the policy says, and what the paper's packing would do, one line each."""
    lines = []
    if answer.policy.goal is not ShrinkGoal.OFF:
        chosen = answer.chosen
        verdict = "keep all stages" if chosen is None else f"{chosen.num_stages} stages would do: {chosen.layout.text}"
        lines.append(f"shrink: {answer.policy.text}: {verdict}")
    if answer.first_fit is not None:
        groups = " ".join("+".join(str(stage) for stage in group) for group in answer.first_fit)
        lines.append(f"shrink: first fit by memory alone (the paper's) would leave {len(answer.first_fit)} stages: {groups}")
    return lines


def sizes_table(answer: SizesAnswer) -> Table:
    """Every smaller size against today's layout and against the best of today's size."""
    best, today = answer.sizes.best, answer.sizes.today if answer.has_current else None
    rows: list[Sequence[str]] = []
    for size in answer.sizes.smaller:
        if isinstance(size, Unpackable):
            rows.append((str(size.num_stages), *("-" * 6), size.reason))
            continue
        rows.append(
            (
                str(size.num_stages),
                f"{size.bottleneck_seconds:.4g}",
                f"{size.step_seconds:.4g}",
                f"{slowdown(size, best):+z.1%}",
                "-" if today is None else f"{slowdown(size, today):+z.1%}",
                f"x{per_gpu(size, best):.2f}",
                "-" if today is None else f"x{per_gpu(size, today):.2f}",
                size.layout.text,
            )
        )
    columns = (
        "stages",
        "slowest stage s",
        "step s",
        "step vs best now",
        "vs today",
        "tokens/s/GPU vs best now",
        "vs today",
        "layout",
    )
    return table(
        "the same job on fewer stages (all tokens: a longer step is as much less throughput)", columns, rows, left=("layout",)
    )
