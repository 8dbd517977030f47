"""Requests: a layout that is asked for within a step comes at its end, once, if the run can go there at all."""

import logging

import pytest

from megatron_dyn.config import ConfigError, DecideConfig, DynConfig
from megatron_dyn.records import Layout
from tests.unit.jobs import Job, config_of


def requested(job, layout):
    """Ask on every rank, as a step would."""
    for controller in job.controllers:
        controller.request(Layout.contiguous(layout))


def test_it_comes_at_the_next_boundary_and_the_last_one_counts():
    job = Job(config_of("at:50")).run(3, close=False)
    requested(job, (1, 7))
    requested(job, (6, 2))
    job.run(6, first=4)
    assert job.trace[0] == [(4, 4)] * 4 + [(6, 2)] * 2
    assert [(report.iteration, report.reason) for report in job.commits()] == [(4, "requested")]


def test_what_is_in_force_already_makes_no_round():
    job = Job(config_of("at:50")).run(3, close=False)
    requested(job, (4, 4))
    job.run(6, first=4)
    assert job.sink.rounds == []


def test_a_forced_layout_that_is_due_wins_and_the_request_is_dropped_loudly(caplog):
    job = Job(config_of(forced={4: "Et*3|t*5L"})).run(3, close=False)
    requested(job, (6, 2))
    with caplog.at_level(logging.WARNING):
        job.run(6, first=4)
    assert job.trace[0][-1] == (3, 5)
    assert "Et*6|t*2L is dropped" in caplog.text


@pytest.mark.parametrize(
    ("built", "wanted", "told"),
    [
        ("Et*4|t*4L", "Et*4|t*5L", "expected 8 layers, got 9"),
        ("Et*4|t*4L", "Et*2|t*2|t*2|t*2L", "expected 2 stages"),
        ("Et*4|t*4L", "Et*2|t*2||t*4L", "expected 2 stages"),
        ("Et*4|t*4L", "E|t*8L", "leaves stage 0 without a decoder layer"),
        ("Et*2|t*2|t*2|t*2L", "Et*4||t*2|t*2L", "leaves chunk 1 without a decoder layer"),
        ("Et*4|t*4L", "Et*4|t*4mL", "expected E, m and L"),
        ("Et*7|tmL", "Et*8|mL", "with MTP the last decoder layer stays on stage 1"),
        ("Et*8|mL", "Et*7|tmL", "with MTP the last decoder layer stays on stage 0"),
    ],
)
def test_where_a_run_cannot_go_is_told_before_anything_happens(built, wanted, told):
    job = Job(config_of("at:50"))
    controller = job.controllers[0]
    controller.layout = Layout.parse(built, 2)
    with pytest.raises(ValueError, match="requested layout: ") as raised:
        controller.request(Layout.parse(wanted, 2))
    assert told in str(raised.value)


def test_the_same_is_refused_of_a_forced_layout_and_allowed_where_stages_may_be_empty():
    forced = config_of(forced={1: "E|t*8L"})
    with pytest.raises(ConfigError, match="--dyn-layout-at 1: 'E|t\\*8L' leaves stage 0"):
        forced.forced_layouts(built=Layout.parse("Et*4|t*4L", 2))
    anything = DynConfig(decide=DecideConfig(allow_empty_stages=True))
    assert anything.objection(Layout.parse("E|t*8L", 2), built=Layout.parse("Et*4|t*4L", 2)) is None
