"""The picture shows every operation at its time, in colours that can be told apart, and is the same each time."""

import sys
from itertools import combinations

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.picture import draw, write_picture
from megatron_dyn.plan.pipeline.simulator import simulate_pipeline
from megatron_dyn.plan.workload import ChunkTimes


def run_of(num_chunks=2, num_microbatches=4):
    """A step on two stages."""
    return simulate_pipeline(
        ChunkTimes(
            num_stages=2,
            forward_seconds=(1.0,) * num_chunks,
            backward_seconds=(2.0,) * num_chunks,
            p2p_seconds=(0.0,) * (num_chunks - 1),
            optimizer_seconds=(0.0, 0.0),
        ),
        num_microbatches,
    )


def legend_colors(figure):
    """Colour by label."""
    return {patch.get_label(): patch.get_facecolor()[:3] for patch in figure.legends[0].get_patches()}


def brightness(color):
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


def test_every_operation_is_a_bar_with_its_number():
    run = run_of()
    axes = draw([(run, "a title")]).axes[0]
    bars = [path.get_extents() for collection in axes.collections for path in collection.get_paths()]
    starts = sorted((round(bar.x0, 6), round(bar.x1 - bar.x0, 6)) for bar in bars)
    spans = [span for of_stage in run.spans for span in of_stage]
    assert starts == sorted((span.start_seconds, span.end_seconds - span.start_seconds) for span in spans)
    assert sorted(text.get_text() for text in axes.texts) == sorted(str(span.microbatch) for span in spans)
    assert axes.get_title() == "a title"


def test_two_steps_are_below_each_other_on_one_scale():
    long, short = run_of(num_microbatches=8), run_of()
    upper, lower = draw([(long, "now"), (short, "then")]).axes
    assert (upper.get_title(), lower.get_title()) == ("now", "then")
    assert upper.get_xlim() == lower.get_xlim() == (0.0, long.pipeline_seconds)
    assert len(lower.texts) == 16


@pytest.mark.parametrize("num_chunks", [2, 4])
def test_shades_differ_in_brightness_too(num_chunks):
    colors = legend_colors(draw([(run_of(num_chunks), "x")]))
    assert len(colors) == num_chunks + 1
    for one, other in combinations(colors.values(), 2):
        assert abs(brightness(one) - brightness(other)) > 0.02
    assert "waiting" in colors


def test_a_large_step_has_no_numbers_and_a_short_title():
    figure = draw([(run_of(num_microbatches=400), "x" * 500)])
    assert not figure.axes[0].texts
    assert len(figure.axes[0].get_title()) < 120


def test_files_are_of_the_kind_that_the_suffix_says_and_repeat(tmp_path):
    run = run_of()
    for name in ("one.svg", "two.svg", "three.png"):
        write_picture(str(tmp_path / name), [(run, "x")])
    assert (tmp_path / "one.svg").read_text() == (tmp_path / "two.svg").read_text()
    assert "<svg" in (tmp_path / "one.svg").read_text()
    assert (tmp_path / "three.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_drawn_is_said_with_the_flag(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--picture .*cannot be written"):
        write_picture(str(tmp_path / "no" / "x.svg"), [(run_of(), "x")])
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="--picture: needs matplotlib"):
        write_picture(str(tmp_path / "x.svg"), [(run_of(), "x")])
