"""A run as a picture: which stage held which layer and what the layer cost, and the step time below. Needs matplotlib."""

from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from story import Story, counts_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart in every common colour blindness, and by brightness in grey.
_STAGE_COLORS = ((0.0, 0.447, 0.698), (0.902, 0.624, 0.0))
_LEAST_OPACITY = 0.12
"""Of a layer that costs nothing: it is still seen whose it is."""


def write_picture(story: Story, path: Path, title: str) -> None:
    """Draw the run into `path`, SVG or PNG by suffix, 900 pixels wide. The same run, the same file."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.hashsalt": "megatron-dyn", "svg.fonttype": "none", "font.size": 9.5}):
        figure = Figure(figsize=(9.0, 6.4), layout="constrained")
        layers, steps = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        layers.set_title(f"{title}\nwho held which layer; the darker, the more it cost", fontsize=10, loc="left")
        _draw_layers(layers, story)
        _draw_steps(steps, story)
        figure.savefig(path, dpi=100, metadata={"Date": None} if path.suffix == ".svg" else None)


def _draw_layers(axes: "Axes", story: Story) -> None:
    from matplotlib.patches import Patch

    rounds = story.layer_seconds()
    # A layer that something disturbed once must not make all others look cheap.
    most = median(max(by_layer) for _, by_layer in rounds) if rounds else 1.0
    borders = sorted({0, len(story.layouts), *(step for step, _ in story.events), *(step for step, _ in rounds)})
    for start, end in pairwise(borders):
        if start >= len(story.layouts):
            continue
        by_layer = story.layer_seconds_at(end)
        stages = [stage for stage, count in enumerate(counts_of(story.layouts[start])) for _ in range(count)]
        for layer, stage in enumerate(stages):
            share = min(1.0, by_layer[layer] / most) if by_layer else 1.0
            color = (*_STAGE_COLORS[stage % 2], _LEAST_OPACITY + (1 - _LEAST_OPACITY) * share)
            axes.broken_barh([(start + 0.5, end - start)], (layer - 0.46, 0.92), facecolors=[color])
    axes.set_ylabel("layer")
    axes.set_ylim(max(map(sum, map(counts_of, story.layouts))) - 0.5, -0.5)
    handles = [Patch(color=color, label=f"stage {stage}") for stage, color in enumerate(_STAGE_COLORS)]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, fontsize=8, frameon=False)


def _draw_steps(axes: "Axes", story: Story) -> None:
    numbers, seconds = range(1, len(story.step_seconds) + 1), story.step_seconds
    axes.plot(numbers, seconds, ".", color="0.6", markersize=4, label="each step")
    for stretch in story.stretches():
        axes.plot([stretch.first - 0.5, stretch.last + 0.5], [stretch.step_seconds] * 2, color="black", linewidth=1.8)
    moved = {line["iteration"] for line in story.moves}
    changed = {line["iteration"] for line in story.changes if line["changes_costs"]}
    for steps, dashes, label in ((changed, ":", "the model changed"), (moved, "-", "layers moved")):
        for index, step in enumerate(sorted(steps)):
            color = "0.3" if steps is changed else _STAGE_COLORS[0]
            axes.axvline(step + 0.5, color=color, linestyle=dashes, linewidth=1.2, label=label if index == 0 else None)
    # A step in which layers moved may take a second; it must not flatten all others.
    axes.set_ylim(0, 2.4 * median(seconds))
    axes.set_xlim(0.5, len(seconds) + 0.5)
    axes.set_xlabel("training step")
    axes.set_ylabel("seconds a step")
    axes.legend(loc="upper right", ncols=3, fontsize=8)
