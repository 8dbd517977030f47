"""The expected curves: what they take from the first points, and what from the family."""

import pytest

from benchmarks.dynamics.costs import points_of
from benchmarks.dynamics.expected import attention_share, frozen_curve, kernel_curve, linear_curve, token_curve
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule
from tests.unit.benchmarks.dynamics.runs import measured_round


def test_frozen_prefix_keeps_its_forward_and_a_frozen_middle_half_its_backward():
    table = {"0": [20, -1], "2": [20, 40]}
    schedule = FreezeSchedule.of_table(table, flag="--dyn-freeze", num_layers=3, shown="", with_embedding=True)
    layers = [(1.0, 2.0)] * 3
    rounds = [measured_round(9, [(1.0, 2.5)] * 3), measured_round(19, layers), measured_round(29, layers)]
    rounds += [measured_round(39, layers), measured_round(49, layers)]
    curve = frozen_curve(schedule)(points_of(rounds, 10))
    # The first two points, at which everything trained, by their median.
    assert curve == [[3.25] * 3, [3.25] * 3, [1.0, 3.25, 2.125], [1.0, 3.25, 2.125], [1.0, 3.25, 3.25]]


def test_attention_itself_has_no_weights():
    assert attention_share(hidden_size=128, seq_length=128) == pytest.approx(2 / 14)
    assert attention_share(hidden_size=128, seq_length=128, feed_forward=2) == pytest.approx(2 / 22)


def test_linear_layers_cost_what_is_left_of_them():
    rounds = [measured_round(9, [(4.0, 10.0)]), measured_round(19, [(1.0, 1.0)], prune={"sparsity": 0.75})]
    assert linear_curve(hidden_size=128, seq_length=128)(points_of(rounds, 10)) == [[14.0], [pytest.approx(2 + 12 / 4)]]


def test_kernel_times_replace_the_dense_ones():
    rounds = [measured_round(9, [(4.0, 10.0)]), measured_round(19, [(1.0, 1.0)], prune={"sparsity": 0.9})]
    asked = []

    def seconds_of(outputs, inputs, density, num_tokens):
        asked.append((outputs, inputs, num_tokens))
        return 3.0 * density

    curve = kernel_curve(hidden_size=2, num_tokens=7, seconds_of=seconds_of)(points_of(rounds, 10))
    assert curve == [[14.0], [pytest.approx(14.0 - 12.0 + 1.2)]]
    assert set(asked) == {(6, 2, 7), (2, 2, 7), (8, 2, 7), (2, 8, 7)}


def test_experts_share_of_a_layer_follows_their_tokens():
    def told(tokens, steps):
        return {"tokens_per_expert": tokens, "steps": steps}

    rounds = [
        measured_round(9, [(4.0, 18.0)], moe=told([30, 30], 3)),
        measured_round(19, [(1.0, 1.0)], moe=told([5, 5], 1)),
    ]
    # Of 22 parts 2 are attention, 4 its projections and 16 the two experts.
    assert token_curve(hidden_size=128, seq_length=128, topk=2)(points_of(rounds, 10)) == [[22.0], [pytest.approx(6 + 16 / 2)]]
    dense = [measured_round(9, [(1.0, 2.0)]), measured_round(19, [(2.0, 2.0)])]
    assert token_curve(hidden_size=128, seq_length=128, topk=2)(points_of(dense, 10)) == [[3.0], [3.0]]
