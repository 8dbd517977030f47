"""One figure a family: layers over the schedule, step time of the four arms, and their losses on top of each other."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.dynamics.arms import NUM_STAGES, OURS, Study
from benchmarks.dynamics.cases import Case
from benchmarks.dynamics.costs import bound_seconds, group_seconds, points_of, smoothed, trace_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart in every common colour blindness (Okabe and Ito); dashes and widths tell lines apart in grey as well.
_BLUE, _ORANGE, _GREEN, _RED, _PURPLE, _BLACK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#000000"
_ARM_COLORS = (_PURPLE, _ORANGE, _GREEN, _BLUE)
_GROUP_COLORS = (_BLUE, _ORANGE, _GREEN, _RED, _PURPLE)
_CURVE_DASHES = ("-", (0, (4, 2)))
_MARKERS = "osD^v"
_WIDTH_INCHES, _HEIGHT_INCHES = 9.0, 10.0
"""900 pixels wide at the 100 dpi that browsers take for an SVG's inch, near enough."""


def write_picture(case: Case, study: Study, path: Path) -> None:
    """Draw into `path` (.svg or .png). The same study gives the same file."""
    from matplotlib import rc_context

    with rc_context({"svg.hashsalt": "megatron-dyn", "svg.fonttype": "none", "font.size": 9.5}):
        figure = draw(case, study)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw(case: Case, study: Study) -> "Figure":
    """The three panels as a matplotlib figure that belongs to no window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    layers, steps, losses = figure.subplots(3, 1, sharex=True)
    _draw_layers(layers, case, study)
    _draw_steps(steps, case, study)
    _draw_losses(losses, study)
    for axes in (layers, steps, losses):
        axes.spines[["top", "right"]].set_visible(False)
        for change in sorted({line["iteration"] for line in study.profile.changes if line["changes_costs"]}):
            axes.axvline(change + 0.5, color="0.8", linewidth=0.8, zorder=0)
    losses.set_xlabel("training step (grey lines: the family changed the model)")
    losses.set_xlim(0, case.num_steps + 1)
    return figure


def _draw_layers(axes: "Axes", case: Case, study: Study) -> None:
    points = points_of(study.profile.rounds, case.every_steps)
    edges = [0.5, *(point.step + 0.5 for point in points)]
    middles = [(start + end) / 2 for start, end in zip(edges, edges[1:], strict=False)]
    for color, marker, (name, ids) in zip(_GROUP_COLORS, _MARKERS, case.groups.items(), strict=False):
        measured = [1e3 * group_seconds([cost.seconds for cost in point.layers], ids) for point in points]
        axes.plot(middles, measured, marker, color=color, markersize=5, label=name)
        for dashes, curve in zip(_CURVE_DASHES, study.curves.values(), strict=False):
            expected = [1e3 * group_seconds(by_layer, ids) for by_layer in curve]
            axes.stairs(expected, edges, baseline=None, color=color, linewidth=1.2, linestyle=dashes)
    heads = [1e3 * point.head.seconds for point in points]
    axes.plot(middles, heads, "x", color=_BLACK, markersize=5, label="norm, head and loss")
    kinds = ", ".join(f"{name} ({'dashed' if index else 'line'})" for index, name in enumerate(study.curves))
    axes.set_title(f"{case.title}\nlayers: measured (marks) and {kinds}", fontsize=10, loc="left")
    axes.set_ylabel("ms per micro-batch,\nforward and backward")
    _legend_above(axes, ncols=6)


def _draw_steps(axes: "Axes", case: Case, study: Study) -> None:
    numbers = range(1, case.num_steps + 1)
    for color, arm in zip(_ARM_COLORS, study.arms, strict=True):
        ours = arm.name == OURS
        axes.plot(
            numbers, smoothed(arm.lap_seconds), color=color, linewidth=2.2 if ours else 1.4, label=arm.name, zorder=2 + ours
        )
    bound = bound_seconds(trace_of(points_of(study.profile.rounds, case.every_steps), case.num_steps), NUM_STAGES)
    axes.plot(numbers, bound, color=_BLACK, linewidth=1.0, linestyle=":", label="bound: layers cut at will")
    moves = [line["iteration"] for line in study.arms[-1].rounds if line["outcome"] == "commit"]
    for index, step in enumerate(moves):
        label = "layers moved" if index == 0 else None
        axes.plot([step + 0.5], [0], "^", color=_BLUE, markersize=7, clip_on=False, label=label)
    axes.set_title("step time, running median of 5 steps", fontsize=10, loc="left")
    axes.set_ylabel("seconds")
    _legend_above(axes, ncols=3)


def _legend_above(axes: "Axes", *, ncols: int) -> None:
    """A legend in a band of its own, so that it hides no data."""
    axes.set_ylim(0, 1.28 * axes.get_ylim()[1])
    axes.legend(loc="upper left", ncols=ncols, fontsize=8, frameon=False, columnspacing=1.2, handletextpad=0.4)


def _draw_losses(axes: "Axes", study: Study) -> None:
    # Wide lines first, so that all four can be seen although they are one.
    widths: Mapping[int, float] = {0: 8.0, 1: 5.5, 2: 3.2, 3: 1.2}
    for index, (color, arm) in enumerate(zip(_ARM_COLORS, study.arms, strict=True)):
        values = arm.loss_values
        axes.plot(range(1, len(values) + 1), values, color=color, linewidth=widths[index], label=arm.name)
    verdict = "equal in every bit, gradient norms too" if study.equal else "DIFFERENT"
    axes.set_title(f"loss of all four: {verdict}", fontsize=10, loc="left")
    axes.set_ylabel("loss")
    axes.legend(ncols=2, fontsize=8, frameon=False)
