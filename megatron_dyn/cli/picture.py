"""Simulated steps as a picture: one row a stage, time to the right. Needs matplotlib, which is imported when one is drawn."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_dyn.cli.errors import InputError
from megatron_dyn.plan.pipeline.schedule import Phase
from megatron_dyn.plan.pipeline.simulator import PipelineRun

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURE_SUFFIXES = (".svg", ".png")

_COLORS = {Phase.FORWARD: (0.0, 0.447, 0.698), Phase.BACKWARD: (0.902, 0.624, 0.0)}
"""Blue and orange: told apart in every common colour blindness, and by brightness in grey."""
_WAITING = "0.93"
_MAX_NUMBERED = 600
"""Operations beyond which their micro-batch numbers would be a smear."""
_MAX_VECTORS = 20_000
"""Operations beyond which an SVG of single shapes is too large to open; they become one bitmap in it."""
_MAX_TITLE = 110


Panel = tuple[PipelineRun, str]
"""A step and its title."""


def write_picture(path: str, panels: Sequence[Panel]) -> None:
    """Draw the steps into `path`, SVG or PNG by suffix; raises InputError naming `--picture`. The same steps, the same file."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise InputError(
            "--picture: needs matplotlib, which is not installed (the extra `plot` of megatron-dyn has it)"
        ) from error
    figure = draw(panels)
    try:
        with rc_context({"svg.hashsalt": "megatron-dyn", "svg.fonttype": "none"}):
            figure.savefig(path, dpi=144, metadata={"Date": None} if path.endswith(".svg") else None)
    except OSError as error:
        raise InputError(f"--picture {path}: cannot be written: {error.strerror or error}") from error


def draw(panels: Sequence[Panel]) -> "Figure":
    """The picture as a matplotlib figure that belongs to no window: the steps below each other, on one scale of time."""
    from matplotlib.figure import Figure

    num_rows = sum(len(run.spans) for run, _ in panels)
    size = (12.0, min(40.0, 0.7 + 0.9 * len(panels) + 0.34 * num_rows))
    figure = Figure(figsize=size, layout="constrained")
    every_axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    longest = max(run.pipeline_seconds for run, _ in panels)
    for axes, (run, title) in zip(every_axes, panels, strict=True):
        _draw_panel(axes, run, title, longest or 1.0)
    every_axes[-1].set_xlabel("seconds")
    num_virtual = max(_num_virtual(run) for run, _ in panels)
    figure.legend(handles=_legend(num_virtual), loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    return figure


def _draw_panel(axes: "Axes", run: PipelineRun, title: str, width_seconds: float) -> None:
    from matplotlib.ticker import MaxNLocator

    short = title if len(title) <= _MAX_TITLE else f"{title[: _MAX_TITLE // 3]} ... {title[-_MAX_TITLE // 2 :]}"
    axes.set_title(short, fontsize=9)
    axes.set_ylabel("stage")
    axes.set_ylim(len(run.spans) - 0.5, -0.5)
    axes.set_xlim(0.0, width_seconds)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_spans(axes, run)
    _draw_numbers(axes, run)


def _num_virtual(run: PipelineRun) -> int:
    return max((span.chunk for of_stage in run.spans for span in of_stage), default=0) // len(run.spans) + 1


def _shade(phase: Phase, virtual: int, num_virtual: int) -> tuple[float, float, float]:
    """Chunks of one stage from full colour to half way to white."""
    fade = 0.6 * virtual / max(1, num_virtual - 1) if num_virtual > 1 else 0.0
    red, green, blue = (channel + (1.0 - channel) * fade for channel in _COLORS[phase])
    return red, green, blue


def _draw_spans(axes: "Axes", run: PipelineRun) -> None:
    num_stages, num_virtual = len(run.spans), _num_virtual(run)
    num_operations = sum(map(len, run.spans))
    bitmap = num_operations > _MAX_VECTORS
    # A white line around each of thousands of bars would leave nothing of them.
    edge = "white" if num_operations <= _MAX_NUMBERED else "none"
    for pp_rank, of_stage in enumerate(run.spans):
        axes.barh(pp_rank, run.pipeline_seconds, height=0.86, color=_WAITING, zorder=0)
        for phase in Phase:
            for virtual in range(num_virtual):
                bars = [
                    (span.start_seconds, span.end_seconds - span.start_seconds)
                    for span in of_stage
                    if span.phase is phase and span.chunk // num_stages == virtual
                ]
                color = _shade(phase, virtual, num_virtual)
                axes.broken_barh(
                    bars, (pp_rank - 0.43, 0.86), facecolors=[color], edgecolor=edge, linewidth=0.4, rasterized=bitmap
                )


def _draw_numbers(axes: "Axes", run: PipelineRun) -> None:
    if sum(map(len, run.spans)) > _MAX_NUMBERED:
        return
    for of_stage in run.spans:
        for span in of_stage:
            if span.end_seconds - span.start_seconds > 0.008 * run.pipeline_seconds:
                middle = (span.start_seconds + span.end_seconds) / 2
                color = "white" if span.phase is Phase.FORWARD and span.chunk < len(run.spans) else "black"
                axes.text(middle, span.pp_rank, str(span.microbatch), ha="center", va="center", fontsize=5, color=color)


def _legend(num_virtual: int) -> "list[object]":
    from matplotlib.patches import Patch

    handles: list[object] = [
        Patch(color=_shade(phase, virtual, num_virtual), label=phase.value + (f", chunk {virtual}" if num_virtual > 1 else ""))
        for phase in Phase
        for virtual in range(min(num_virtual, 4))
    ]
    return [*handles, Patch(color=_WAITING, label="waiting")]
