"""Stage totals as layer costs: the totals come out again, the median decides, and the answer says that it is inferred."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.cli.inferred import infer
from megatron_dyn.records import Layout


def totals(layout, costs):
    """What the stages take with these costs."""
    sums = [math.fsum(costs.layer_seconds[layer] for layer in layout.layers_of_stage(s)) for s in range(layout.num_stages)]
    for index, chunk in enumerate(layout.chunks):
        ends = (
            chunk.embedding * costs.embedding_seconds
            + chunk.loss * costs.head_seconds
            + bool(chunk.num_mtp) * costs.mtp_seconds
        )
        sums[index % layout.num_stages] += ends
    return sums


def test_a_public_report():
    """users.md C1: layer 1.067, tail 16.9; nothing is left for the embedding."""
    layout = Layout.parse("Et*18|t*24|t*24|t*12m*7L", 4)
    costs = infer(layout, [19.1, 25.6, 25.6, 29.7])
    assert costs.layer_seconds[18:] == pytest.approx([25.6 / 24] * 60)
    assert costs.head_seconds == pytest.approx(16.9)
    assert (costs.embedding_seconds, costs.mtp_seconds) == (0.0, 0.0)
    assert totals(layout, costs) == pytest.approx([19.1, 25.6, 25.6, 29.7])
    assert "inferred from stage totals, not measured" in costs.how
    assert "MTP, head and loss 16.9 s" in costs.how


@pytest.mark.parametrize(
    ("text", "num_stages", "stages", "layer", "ends"),
    [
        ("Ett|tt|tt|ttL", 4, [3, 2, 2, 5], 1, (1, 3, 0)),
        ("Ett|tt|t|m|L", 5, [3, 2, 1, 4, 6], 1, (1, 6, 4)),
        ("Et|t|t|t|tL", 5, [3, 1, 2, 9, 7], [2, 1, 2, 9, 2], (1, 5, 0)),
        ("Ett|ttL", 2, [2, 5], 1, (0, 3, 0)),
        ("Et|t|t|tL", 2, [3, 2], 1, (1, 0, 0)),
        ("EttL", 1, [4], 2, (0, 0, 0)),
    ],
)
def test_ends_are_what_is_left(text, num_stages, stages, layer, ends):
    costs = infer(Layout.parse(text, num_stages), stages)
    assert costs.layer_seconds == pytest.approx(layer if isinstance(layer, list) else [layer] * len(costs.layer_seconds))
    assert (costs.embedding_seconds, costs.head_seconds, costs.mtp_seconds) == pytest.approx(ends)


@given(st.lists(st.floats(0.1, 100), min_size=4, max_size=4), st.lists(st.integers(1, 5), min_size=4, max_size=4))
def test_the_totals_come_out_again(stages, counts):
    layout = Layout.contiguous(counts)
    assert totals(layout, infer(layout, stages)) == pytest.approx(stages)


@pytest.mark.parametrize(
    ("stages", "message"), [([1, 2, 3], "expected 2 totals, one for each stage of 'Et|tL', got 3"), ([0, 0], "that takes time")]
)
def test_totals_that_say_nothing_are_refused(stages, message):
    with pytest.raises(ValueError, match=message):
        infer(Layout.contiguous([1, 1]), stages)
