"""The quantised reference of a layer and its distance, against plain loops."""

import pytest
import torch

from megatron_dyn.dynamics.freezing.reference import (
    REFERENCE,
    attach_reference,
    copy_reference,
    plasticity,
    similarity_distance,
)


class Layer(torch.nn.Module):
    """Stands for a decoder layer: takes hidden states by keyword, gives (hidden, context)."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 6)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, hidden_states, attention_mask=None):
        return torch.tanh(self.dropout(self.first(hidden_states))), None


def plain_distance(ours, theirs):
    def similarities(activations):
        rows = activations.reshape(-1, activations.shape[-1]).double()
        matrix = [[float((a * b).sum()) for b in rows] for a in rows]
        return [[value / max(sum(x * x for x in row) ** 0.5, 1e-12) for value in row] for row in matrix]

    first, second = similarities(ours), similarities(theirs)
    count = len(first) ** 2
    return sum((a - b) ** 2 for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True)) / count


def test_the_distance_is_that_of_similarity_matrices():
    torch.manual_seed(1)
    ours, theirs = torch.randn(3, 2, 5), torch.randn(3, 2, 5)
    # fp64 sums in another order.
    assert similarity_distance(ours, theirs) == pytest.approx(plain_distance(ours, theirs), rel=1e-9)
    assert similarity_distance(ours, ours) == 0.0


def test_a_copy_is_within_half_a_step_of_int8_and_a_layer_that_learns_moves_away_from_it():
    torch.manual_seed(2)
    layer = Layer()
    attach_reference(layer)
    copy_reference(layer)
    carried = getattr(layer, REFERENCE)
    scale = carried.get("scale:first.weight")
    restored = carried.get("quantised:first.weight").float() * scale.unsqueeze(1)
    assert float((restored - layer.first.weight).abs().max()) <= 0.5001 * float(scale.max())
    hidden = torch.randn(4, 2, 6)
    state = torch.get_rng_state()
    fresh = plasticity(layer, (), {"hidden_states": hidden})
    assert torch.equal(state, torch.get_rng_state())
    assert layer.training
    with torch.no_grad():
        layer.first.weight.add_(torch.randn(6, 6))
    assert plasticity(layer, (), {"hidden_states": hidden}) > 100 * fresh


def test_a_row_of_zeros_has_a_copy_too():
    layer = Layer()
    torch.nn.init.zeros_(layer.first.weight)
    attach_reference(layer)
    copy_reference(layer)
    assert torch.isfinite(torch.tensor(plasticity(layer, (), {"hidden_states": torch.randn(4, 1, 6)})))
