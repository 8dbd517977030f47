"""A timing file as a record: every form gives the same costs, and what contradicts itself is refused with its line."""

import json

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.timing_file import read_timing
from megatron_dyn.plan.speeds import Observation
from megatron_dyn.records import Cost, Layout


def test_numbers_are_a_third_forward_and_the_file_says_so(timing):
    file = read_timing(str(timing([3, 6])))
    assert [(cost.forward_seconds, cost.backward_seconds) for cost in file.layers] == [(1.0, 2.0), (2.0, 4.0)]
    assert file.notes == ("seconds of a layer count as one third forward, two thirds backward",)
    assert (file.layout, file.num_microbatches, file.num_mtp, file.layer_parameters) == (None, None, 0, None)
    assert not file.knows_bytes


def test_json_and_csv_give_the_same_costs(timing):
    rows = [{"forward_seconds": 1, "backward_seconds": 2.5, "activation_bytes": 7}, {"seconds": 3, "kind": "moe"}]
    as_json = read_timing(str(timing({"layers": rows, "head": {"seconds": 9}})))
    text = "layer,forward_seconds,backward_seconds,activation_bytes,seconds,kind\n0,1,2.5,7,,\n1,,,,3,moe\nhead,,,,9,\n"
    as_csv = read_timing(str(timing(text, "timing.csv")))
    assert (as_json.layers, as_json.head, as_json.kinds) == (as_csv.layers, as_csv.head, as_csv.kinds)


def test_every_field_arrives(timing):
    cost = {
        "forward_seconds": 1,
        "backward_seconds": 4,
        "backward_weight_seconds": 2,
        "optimizer_seconds": 0.5,
        "parameter_bytes": 10,
        "gradient_bytes": 20,
        "optimizer_bytes": 40,
        "activation_bytes": 5,
        "parameters": 6,
        "kind": "dense",
    }
    data = {
        "layers": [cost, cost],
        "embedding": {"seconds": 0, "state_bytes": 8},
        "mtp": {"seconds": 3, "num_layers": 2},
        "other_seconds": 0.25,
        "num_microbatches": 16,
        "p2p_seconds": [0.125],
        "speeds": [1, 0.5],
        "uncut": [1],
        "pinned_first": 1,
        "pinned_last": 2,
        "layout": "Et|tmmL",
        "num_stages": 2,
        "measured_step_seconds": 12,
        "observations": [{"layer": 1, "pp_rank": 0, "seconds": 2}],
    }
    file = read_timing(str(timing(data)))
    expected = Cost(
        forward_seconds=1,
        backward_seconds=4,
        backward_weight_seconds=2,
        optimizer_seconds=0.5,
        state_bytes=70,
        activation_bytes=5,
        moved_bytes=50,
    )
    assert file.layers == (expected, expected)
    assert (file.embedding.state_bytes, file.embedding.moved_bytes) == (8, 8)
    assert (file.mtp.seconds, file.num_mtp, file.layer_parameters, file.kinds) == (3.0, 2, (6, 6), ("dense", "dense"))
    assert (file.uncut, file.pinned_first, file.pinned_last) == ((1,), 1, 2)
    assert file.layout == Layout.parse("Et|tmmL", 2)
    assert file.measured_step_seconds == 12
    assert file.observations == (Observation(layer=1, pp_rank=0, seconds=2.0),)
    work = file.workload(num_stages=2, num_virtual=1, num_microbatches=16)
    assert (work.other_seconds, work.p2p_seconds, work.speeds, work.uncut) == (0.25, (0.125,), (1.0, 0.5), (1,))


def test_stage_totals_become_layers(timing):
    """users.md C1."""
    file = read_timing(str(timing({"layout": "Et*18|t*24|t*24|t*12m*7L", "stages": [19.1, 25.6, 25.6, 29.7]})))
    assert (len(file.layers), file.num_mtp) == (78, 7)
    assert file.head.seconds == pytest.approx(16.9)
    assert "inferred" in file.notes[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "Et|tm|tL"}, r":2: layout: .* follows an MTP layer"),
        ({"layout": "Et|tL"}, ":2: layout: places 2 layers, layers lists 3"),
        ({"layout": "Et|t|tL", "num_stages": 2}, ":2: layout: .* cannot be spread over 2"),
        ({"mtp": 1, "layout": "Et|ttL"}, r":2: mtp: expected the 0 MTP layers .* got 1"),
        ({"mtp": {"seconds": 1, "num_layers": 2}, "layout": "Et|ttmL"}, r":2: mtp: expected the 1 MTP layers .* got 2"),
        ({"uncut": [0]}, r":3: uncut\[0\]: expected a layer from 1 to 2, got 0"),
        ({"pinned_last": 4}, ":2: pinned_last: expected at most 3 layers, got 4"),
        ({"head": {"seconds": 1, "num_layers": 2}}, ":4: head.num_layers: expected in mtp only"),
        (
            {"layers": [1, {"seconds": 3, "backward_weight_seconds": 2.5}, 1]},
            "layers.1..backward_weight_seconds: expected at most",
        ),
        ({"layers": [{"seconds": 3, "parameters": 2}, 1, 1]}, r"layers\[1\]: expected the field 'parameters'"),
        (
            {"layout": "Et|ttL", "observations": [{"layer": 3, "pp_rank": 0, "seconds": 1}]},
            r"observations\[0\]: expected a layer below 3, got 3",
        ),
    ],
)
def test_contradictions_are_refused_with_their_line(timing, changes, message):
    data = changes | ({} if "layers" in changes else {"layers": [1, 1, 1]})
    with pytest.raises(InputError, match=message):
        read_timing(str(timing(json.dumps(data, indent=1))))


def test_errors_in_a_bare_list_name_the_line_too(timing):
    with pytest.raises(InputError, match=r"timing.json:3: layers\[1\].backward_weight_seconds: expected at most"):
        read_timing(str(timing('[1,\n2,{"seconds": 1,\n"backward_weight_seconds": 5}]'.replace("2,{", "{", 1))))


@pytest.mark.parametrize(
    ("changes", "num_virtual", "message"),
    [
        ({"speeds": [1]}, 1, "speeds: expected one for each of 2 stages, got 1"),
        ({"p2p_seconds": [1, 2, 3]}, 1, "p2p_seconds: expected a number or a list of 1, got 3 for 2 stages of 1 chunks"),
        ({"p2p_seconds": [1]}, 2, "p2p_seconds: expected a number or a list of 2, got 1"),
    ],
)
def test_tables_by_rank_must_fit_the_job(timing, changes, num_virtual, message):
    file = read_timing(str(timing({"layers": [1, 1]} | changes)))
    with pytest.raises(InputError, match=message):
        file.workload(num_stages=2, num_virtual=num_virtual, num_microbatches=4)


@pytest.mark.parametrize(("layout", "num_stages", "rank"), [("Et|tL", None, 2), ("Et||t|L", 2, 2), ("Et||t|L", 2.0, 77)])
def test_observations_of_ranks_that_the_layout_does_not_have_are_refused(timing, layout, num_stages, rank):
    data = {"layers": [1, 1], "layout": layout, "observations": [{"layer": 1, "pp_rank": rank, "seconds": 1}]}
    data |= {} if num_stages is None else {"num_stages": num_stages}
    with pytest.raises(
        InputError, match=rf"observations\[0\].pp_rank: expected a rank below the layout's 2 stages, got {rank}"
    ):
        read_timing(str(timing(data)))


def test_whole_floats_are_whole_numbers(timing):
    whole = {
        "layers": [{"seconds": 1, "state_bytes": 4.0, "activation_bytes": 2.0, "parameters": 3.0}] * 4,
        "layout": "Ett|ttmL",
        "num_stages": 2.0,
        "mtp": {"seconds": 1, "num_layers": 1.0},
        "num_microbatches": 8.0,
        "uncut": [3.0],
        "pinned_first": 1.0,
        "pinned_last": 1.0,
        "observations": [{"layer": 1.0, "pp_rank": 1.0, "seconds": 1}],
    }
    file = read_timing(str(timing(whole)))
    assert file.layout == Layout.parse("Ett|ttmL", 2)
    assert type(file.layout.num_stages) is int
    numbers = (file.num_microbatches, file.pinned_first, file.uncut[0], file.num_mtp, file.layers[0].state_bytes)
    assert [(number, type(number)) for number in numbers] == [(value, int) for value in (8, 1, 3, 1, 4)]
