"""The job behind the flags: which layout is the current one, what is assumed and said, what does not fit."""

import argparse

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.jobs import Shape, add_job_arguments, check_operations, figures, job_of, shape_of
from megatron_dyn.cli.timing_file import read_timing
from megatron_dyn.plan.problem import InfeasibleSplit
from megatron_dyn.records import Layout


def job(path, **shape):
    """The job and the notes for a file."""
    return job_of(read_timing(str(path)), Shape(**shape))


def test_flags_become_a_shape():
    parser = argparse.ArgumentParser()
    add_job_arguments(parser)
    words = "--vpp 2 --micro-batches 8 --group-size 5 --memory-gib 1.5 --layout x --allow-empty-stages"
    assert shape_of(parser.parse_args(["f", "--pp", "4", *words.split()])) == Shape(
        pp=4, vpp=2, num_microbatches=8, group_size=5, memory_gib=1.5, layout="x", allow_empty_stages=True
    )
    assert shape_of(parser.parse_args(["f", "--pp", "4"])) == Shape(pp=4)


def test_without_a_layout_there_is_nothing_to_move_from(timing):
    made, notes = job(timing({"layers": [1] * 7, "mtp": {"seconds": 1, "num_layers": 2}}), pp=3)
    assert not made.has_current
    assert made.template.text == "Et*2|t*2|t*3m*2L"
    assert made.workload.num_microbatches == 24
    assert any("24 micro-batches assumed, 8 per stage" in note for note in notes)
    assert (made.min_layers, made.cap_bytes) == (1, None)


def test_mtp_keeps_a_layer_even_where_there_are_few(timing):
    made, _ = job(timing({"layers": [1], "mtp": 1}), pp=3, allow_empty_stages=True)
    assert made.template.text == "E||tmL"
    assert made.min_layers == 0


@pytest.mark.parametrize("shape", [{}, {"vpp": 2}, {"layout": "Et|t*2|t|L"}])
def test_the_layout_in_force_is_where_layers_move_from(timing, shape):
    made, _ = job(timing({"layers": [1] * 4, "layout": "Et|t|t|tL", "num_stages": 2, "num_microbatches": 6}), pp=2, **shape)
    assert made.has_current
    assert made.template.text == shape.get("layout", "Et|t|t|tL")
    assert (made.template.num_virtual, made.workload.num_microbatches) == (2, 6)


def test_a_layout_of_another_size_is_told_and_not_moved_from(timing):
    path = timing({"layers": [1] * 8, "layout": "Et*4|t*4L"})
    made, notes = job(path, pp=4)
    assert not made.has_current
    assert any("2 stages of 1 chunks, planned for 4 of 1: nothing to move from" in note for note in notes)
    made, _ = job(path, pp=2, vpp=2)
    assert (made.has_current, made.template.num_virtual) == (False, 2)


def test_what_the_planner_must_hold_arrives(timing):
    layer = {"seconds": 1, "state_bytes": 5, "parameters": 3}
    data = {"layers": [layer] * 4, "uncut": [2], "pinned_first": 1, "pinned_last": 2}
    made, _ = job(timing(data), pp=2, num_microbatches=4, memory_gib=2.0, group_size=3)
    assert (made.cap_bytes, made.group_size, made.workload.uncut) == (2 * 2**30, 3, (2,))
    assert (made.layer_parameters, made.pinned_first, made.pinned_last) == ((3,) * 4, 1, 2)


@pytest.mark.parametrize(
    ("data", "shape", "message"),
    [
        ([1, 1], {"layout": "Et|tm|tL"}, "--layout: .*cannot be spread over 2"),
        ([1, 1], {"layout": "Et|ttL"}, "--layout: .* places 3 layers, the model has 2 .1 too many."),
        ([1, 1], {"layout": "Et|tL", "vpp": 2}, "--layout 'Et.tL': expected 2 x 2 chunks, got 2"),
        ([1, 1], {"layout": "Et|tmL"}, "expected the file's 0 MTP layers .m., got 1"),
        ([1, 1], {"memory_gib": 1.0}, "--memory-gib 1: expected state_bytes or activation_bytes"),
        ([1, 1], {"vpp": 2, "num_microbatches": 3}, "--pp 2, --vpp 2, --micro-batches 3: .*last group"),
        ({"layers": [1, 1], "speeds": [1]}, {}, "speeds: expected one for each of 2 stages"),
        ({"layers": [1, 1], "layout": "|EttL"}, {}, "expected the embedding on stage 0"),
        (
            {"layers": [1, 1], "pinned_first": 2, "pinned_last": 1},
            {},
            "timing.json: pinned_first and pinned_last: expected .* at most 2 layers together, got 2 and 1$",
        ),
        (
            {"layers": [1, 1], "pinned_first": 2, "mtp": 1},
            {},
            "timing.json: pinned_first and pinned_last: .* got 2 and 1 .mtp keeps one layer on the last stage.$",
        ),
        ([1, 1], {"vpp": 40_000}, "--pp 2, --vpp 40000: expected at most 65536 chunks, got 2 x 40000 = 80000"),
        ({"layers": [1, 1], "num_microbatches": 65_537}, {}, "num_microbatches: expected at most 65536, got 65537"),
        ({"layers": [1, 1], "layout": "Et||t|L", "num_stages": 2, "num_microbatches": 3}, {}, "^--pp 2, 2 virtual stages in "),
    ],
)
def test_what_does_not_fit_is_refused_by_flag_or_field(timing, data, shape, message):
    with pytest.raises(InputError, match=message):
        job(timing(data), pp=2, **shape)


def test_more_stages_than_layers_are_refused_before_a_layout_is_made(timing, monkeypatch):
    monkeypatch.setattr("megatron_dyn.cli.jobs.even_layout", None)
    with pytest.raises(InfeasibleSplit, match="^--pp 3: expected at least 3 layers, .* got 2 in .*timing.json"):
        job(timing([1, 1]), pp=3)


def test_stages_of_the_layout_in_force_may_hold_ends_only(timing):
    made, _ = job(timing({"layers": [1, 1], "layout": "Et|t|mL"}), pp=3)
    assert made.has_current


def test_micro_batches_are_assumed_up_to_the_limit(timing):
    made, notes = job(timing([1] * 16_384), pp=16_384)
    assert made.workload.num_microbatches == 65_536
    assert any("65536 micro-batches assumed, 4 per stage" in note for note in notes)


def test_figures_have_the_names_that_were_given():
    assert figures(Shape(pp=2), 1, 8) == "--pp 2, num_microbatches 8"
    assert figures(Shape(pp=2, num_microbatches=8), 3, 8) == "--pp 2, 3 virtual stages in the layout, --micro-batches 8"
    assert figures(Shape(pp=2, vpp=3), 3, 8) == "--pp 2, --vpp 3, num_microbatches 8"


def test_a_step_of_too_many_operations_is_refused():
    layout = Layout.contiguous([1] * 10)
    check_operations(layout, 50_000, "")
    with pytest.raises(InputError, match=r"^x: expected at most 1000000 .* got 2 x 50001 x 10 = 1000020$"):
        check_operations(layout, 50_001, "x")


def test_sizes_that_cannot_be_added_up_are_refused_by_name(timing):
    path = timing({"layers": [{"seconds": 1, "state_bytes": 2**50}] * 2200})
    with pytest.raises(InputError, match=r"timing.json: state_bytes and activation_bytes: expected .* sizes that sum below"):
        job(path, pp=2, memory_gib=1e9)
