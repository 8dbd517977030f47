"""A picture is drawn, the same each time, of all that the study has."""

from benchmarks.dynamics.picture import draw, write_picture
from tests.unit.benchmarks.dynamics.runs import FREEZING, differing, study


def test_a_study_gives_one_file_that_says_what_is_in_it(tmp_path):
    for name in ("one.svg", "two.svg"):
        write_picture(FREEZING, study(), tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    for words in ("layers 3-5", "megatron_dyn", "DeepSpeed, by parameters", "equal in every bit", "layers moved", "bound"):
        assert words in text


def test_panels_show_points_arms_and_losses():
    layers, steps, losses = draw(FREEZING, study()).axes
    marks = [line for line in layers.lines if line.get_marker() == "o"]
    assert list(marks[0].get_ydata()) == [3000.0, 1000.0, 1000.0, 1000.0]
    assert list(marks[0].get_xdata()) == [15.5, 45.5, 75.5, 105.5]
    assert [line.get_label() for line in steps.lines[:4]] == [arm.name for arm in study().arms]
    assert len({tuple(line.get_ydata()) for line in losses.lines[:4]}) == 1


def test_losses_that_differ_are_called_so():
    assert "DIFFERENT" in draw(FREEZING, differing()).axes[2].get_title(loc="left")
