"""The page of results: figures, verdicts, and sections that leave each other alone."""

from dataclasses import replace

import pytest

from benchmarks.dynamics.page import empty_page, section, summary, table, with_section
from tests.unit.benchmarks.dynamics.runs import FREEZING, differing, study


def test_figures_of_the_arms_are_those_of_the_runs():
    text = section(FREEZING, study())
    # 16 x 128 tokens a step; 120 steps of 1 s against 2 s.
    assert "| megatron_dyn | `Et*6\\|t*6L`, `Et*8\\|t*4L` from step 36 | 1.000 s | 2,048 | 2.00 |" in text
    assert "| Megatron uniform | `Et*6\\|t*6L` | 2.000 s | 1,024 | 1.00 |" in text
    assert "| 30 | freeze: layers 0-2, 9 frozen |\n| 35 | moved: `Et*6\\|t*6L` to `Et*8\\|t*4L` in 0.25 s |" in text
    assert "| 31-60 | 1000.0 (3000.0) | 3000.0 (3000.0) |" in text
    assert "Machine: a machine. One run of each arm." in text
    assert "The fastest of 3 runs" in section(FREEZING, replace(study(), num_repeats=3))
    assert "equal in every bit" in text


def test_a_difference_is_named():
    assert "DIFFER from those of the profiled run in: megatron_dyn." in section(FREEZING, differing())
    assert summary(FREEZING, study())[-1] == "yes"
    assert summary(FREEZING, differing())[-1] == "NO"


def test_summary_compares_with_uniform_and_with_hindsight():
    assert summary(FREEZING, study()) == ["freezing", "1.000 s", "2.00", "1.60", "yes"]


def test_a_section_is_replaced_and_the_others_stay():
    page = with_section(with_section(empty_page(), "moe", "about experts\n"), "freezing", "first\n")
    again = with_section(page, "freezing", "second\n")
    assert "first" not in again
    assert again.index("second") < again.index("about experts")
    with pytest.raises(ValueError, match="family: absent"):
        with_section(page, "absent", "")


def test_bars_in_cells_are_escaped():
    assert table(["a"], [["x|y"]]) == "| a |\n| --- |\n| x\\|y |"
