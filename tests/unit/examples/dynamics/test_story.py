"""The story of a run is what its files say."""

import pytest
from story import counts_of, read_story

from tests.unit.examples.dynamics.runs import write_run


def test_a_run_is_told_in_stretches_between_events(tmp_path):
    story = read_story(*write_run(tmp_path))
    assert story.events == [(4, "layers 0-1 frozen"), (6, "moved layer 2")]
    found = [(part.first, part.last, part.began_with, part.layout, part.step_seconds) for part in story.stretches()]
    assert found == [
        (1, 4, "", "Et*2|t*2L", 0.6),
        (5, 6, "layers 0-1 frozen", "Et*2|t*2L", 0.4),
        (7, 12, "moved layer 2", "Et*3|tL", 0.3),
    ]
    assert story.layer_seconds() == [(6, [0.01, 0.01, 0.03, 0.03])]
    assert (story.losses[0], story.losses[-1]) == (5.9, 4.8)


def test_costs_of_a_step_are_those_of_a_round_with_the_model_in_the_same_state(tmp_path):
    story = read_story(*write_run(tmp_path))
    frozen = [0.01, 0.01, 0.03, 0.03]
    assert [story.layer_seconds_at(step) for step in (4, 5, 6, 12)] == [None, frozen, frozen, frozen]


def test_two_things_at_one_boundary_begin_one_stretch(tmp_path):
    report, log = write_run(tmp_path)
    lines = (report / "dynamics.jsonl").read_text().replace('"iteration": 4', '"iteration": 6')
    (report / "dynamics.jsonl").write_text(lines)
    assert [part.began_with for part in read_story(report, log).stretches()] == ["", "layers 0-1 frozen; moved layer 2"]


def test_log_and_report_must_tell_of_the_same_steps(tmp_path):
    report, log = write_run(tmp_path)
    log.write_text("\n".join(log.read_text().splitlines()[:-1]))
    with pytest.raises(ValueError, match="expected a line for each of the 12 steps in .*, got 11"):
        read_story(report, log)


@pytest.mark.parametrize(("layout", "counts"), [("Et*3|ttL", [3, 2]), ("EtL", [1]), ("E|t*12|L", [0, 12, 0])])
def test_counts_of_a_layout(layout, counts):
    assert counts_of(layout) == counts
