"""users.md C14: equal stage totals, and slow device, heavy stage and nothing known are three different pieces of advice."""

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.timing_file import read_timing
from megatron_dyn.cli.verdicts import with_speeds


def dense(seconds, count):
    """Layers that are declared to be alike."""
    return [{"seconds": seconds, "kind": "dense"}] * count


SLOW = {"layers": [*dense(1, 16), *dense(2, 8), *dense(1, 8)], "layout": "Et*8|t*8|t*8|t*8L"}
HEAVY = {"layers": dense(1, 40), "layout": "Et*8|t*8|t*16|t*8L"}
UNTOLD = {"layers": [1] * 40, "layout": "Et*8|t*8|t*16|t*8L"}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (SLOW, "stage 2 (16 s a micro-batch): slow device, 0.50 times the speed of the typical rank it was compared with"),
        (HEAVY, "stage 2 (16 s a micro-batch): heavy stage: "),
        (UNTOLD, "stage 2 (16 s a micro-batch): slow device or heavy stage, can't be told yet"),
    ],
)
def test_equal_totals_get_different_advice(timing, data, words):
    file, notes = with_speeds(read_timing(str(timing(data))), 4)
    assert notes[0].startswith(words)
    assert list(notes[1:]) == ["speeds of ranks are carried over: 4 stages as in the file"] * (file.speeds is not None)


def test_a_slow_rank_is_taken_out_of_the_costs(timing):
    data = SLOW | {"head": {"seconds": 3, "optimizer_seconds": 1}}
    before = read_timing(str(timing(data)))
    file, _ = with_speeds(before, 4)
    assert file.speeds == pytest.approx((1, 1, 0.5, 1))
    assert [layer.seconds for layer in file.layers] == pytest.approx([1.0] * 32)
    assert file.head == before.head
    shape = {"num_stages": 4, "num_virtual": 1, "num_microbatches": 1}
    times, measured = (each.workload(**shape).chunk_times(before.layout) for each in (file, before))
    assert times.forward_seconds == pytest.approx(measured.forward_seconds)


def test_one_layer_timed_on_two_ranks_tells(timing):
    seen = [{"layer": layer, "pp_rank": rank, "seconds": 2.0} for layer, rank in ((15, 2), (24, 2), (7, 1))]
    seen[2]["seconds"] = 1.0
    file, notes = with_speeds(read_timing(str(timing(UNTOLD | {"observations": seen}))), 4)
    assert "slow device" in notes[0]
    assert "0.50 times the speed of the typical rank" in notes[0]
    assert file.speeds == pytest.approx((1, 1, 0.5, 1))


@pytest.mark.parametrize(
    "changes",
    [{"layers": dense(1, 40), "layout": "Et*10|t*10|t*10|t*10L"}, {"speeds": [1, 1, 0.5, 1]}, {"layout": "Et*20|t*20L"}],
)
def test_even_stages_given_speeds_and_other_sizes_are_left_alone(timing, changes):
    file = read_timing(str(timing(UNTOLD | changes)))
    assert with_speeds(file, 4) == (file, ())


@pytest.mark.parametrize("num_stages", [2, 8])
def test_another_number_of_stages_gets_the_costs_and_no_speeds(timing, num_stages):
    measured = SLOW | {"p2p_seconds": [1] * (num_stages - 1)}
    file, notes = with_speeds(read_timing(str(timing(measured))), num_stages)
    assert file.speeds is None
    assert [layer.seconds for layer in file.layers] == pytest.approx([1.0] * 32)
    assert notes[0].startswith("stage 2 of the layout in the file (16 s a micro-batch): slow device, 0.50 times")
    assert "fewer layers" not in notes[0]
    assert notes[1].startswith(
        f"speeds of ranks are not carried over to another number of stages (4 in the file, {num_stages} planned)"
    )


def test_a_heavy_stage_of_another_layout_is_no_news(timing):
    file = read_timing(str(timing(HEAVY)))
    assert with_speeds(file, 2) == (file, ())


def test_impossible_observations_are_refused(timing):
    file = read_timing(str(timing(UNTOLD | {"observations": [{"layer": 1, "pp_rank": 3, "seconds": 0}]})))
    with pytest.raises(InputError, match="observations: .* expected seconds above 0"):
        with_speeds(file, 4)
