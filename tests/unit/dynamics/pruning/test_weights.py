"""Which parameters take part, by the names that Megatron's layers give them."""

import pytest
import torch

from megatron_dyn.dynamics.pruning.weights import place_of, prunable


def layer_with(*names, dimensions=2):
    """A module with parameters of these dotted names."""
    layer = torch.nn.Module()
    for name in names:
        *parts, last = name.split(".")
        module = layer
        for part in parts:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        module.register_parameter(last, torch.nn.Parameter(torch.ones(*[4] * dimensions)))
    return layer


LINEARS = [
    "self_attention.linear_proj.weight",
    "self_attention.linear_qkv.weight",
    "mlp.experts.local_experts.0.linear_fc1.weight",
    "mlp.experts.linear_fc2.weight3",
    "mlp.shared_experts.linear_fc1.weight",
]
OTHERS = [
    "mlp.router.weight",
    "mlp.shared_experts.gate_weight",
    "input_layernorm.weight",
    "self_attention.linear_qkv.layer_norm_weight",
    "self_attention.linear_qkv.bias",
]


def test_linear_layers_take_part_and_nothing_else():
    assert list(prunable(layer_with(*LINEARS, *OTHERS), ())) == [name for name, _ in layer_with(*LINEARS).named_parameters()]
    assert prunable(layer_with(*LINEARS, dimensions=1), ()) == {}


@pytest.mark.parametrize(
    ("exclude", "left"),
    [
        (("experts",), {0, 1, 4}),
        (("shared_experts",), {0, 1, 2, 3}),
        (("linear_fc1", "linear_qkv"), {0, 3}),
        (("mlp", "self_attention"), set()),
    ],
)
def test_excluded_names_are_parts_of_a_name(exclude, left):
    assert set(prunable(layer_with(*LINEARS), exclude)) == {LINEARS[index] for index in left}


def test_what_is_not_cut_is_in_one_place():
    assert place_of(torch.nn.Parameter(torch.ones(2, 2))) == (0, 0)
