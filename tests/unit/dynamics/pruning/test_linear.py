"""Specs in which Megatron's linear layers are ours: all else stays, and they travel. On real ranks: test_pruning."""

import pickle
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_dyn.dynamics.pruning import linear
from megatron_dyn.dynamics.pruning.linear import (
    PrunableColumnParallelLinear,
    PrunableLinear,
    PrunableRowParallelLinear,
    with_prunable_linears,
)


@dataclass(frozen=True)
class Frozen:
    inside: object
    number: int = 3


def classes_in(spec):
    """Every class that a spec names, depth first."""
    if isinstance(spec, type):
        yield spec
    elif isinstance(spec, partial):
        yield from classes_in([spec.func, *spec.args, *spec.keywords.values()])
    elif isinstance(spec, list | tuple):
        for part in spec:
            yield from classes_in(part)
    elif hasattr(spec, "__dict__"):
        yield from classes_in(list(vars(spec).values()))


@pytest.mark.parametrize("options", [{}, {"num_experts": 4}, {"multi_latent_attention": True}])
def test_every_linear_layer_of_megatrons_own_is_replaced_and_nothing_else(options):
    spec = get_gpt_layer_local_spec(**options)
    before = list(classes_in(spec))
    edited = with_prunable_linears(spec)
    instead = {ColumnParallelLinear: PrunableColumnParallelLinear, RowParallelLinear: PrunableRowParallelLinear}
    assert list(classes_in(spec)) == before
    assert list(classes_in(edited)) == [instead.get(each, each) for each in before]
    assert before.count(ColumnParallelLinear) >= 2
    assert list(classes_in(pickle.loads(pickle.dumps(edited)))) == list(classes_in(edited))


def test_subclasses_and_frozen_specs_are_left_and_followed():
    class Own(ColumnParallelLinear):
        pass

    spec = Frozen({"a": Own, "b": partial(RowParallelLinear, bias=False)})
    edited = with_prunable_linears(spec)
    assert (edited.inside["a"], edited.inside["b"].func, edited.number) == (Own, PrunableRowParallelLinear, 3)
    assert spec.inside["b"].func is RowParallelLinear


class Host:
    def _forward_impl(self, input, weight, *args, **options):
        return "Megatron's"


class Ours(PrunableLinear, Host):
    pass


PLAIN = {"bias": None, "gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}


def ours(sparse=True):
    layer = Ours()
    layer.sparse = SimpleNamespace(linear=lambda x, weight: x + 1) if sparse else None
    return layer


def test_the_product_is_taken_over_only_where_megatron_asks_for_nothing_but_that():
    x = torch.zeros(2)
    assert ours(sparse=False)._forward_impl(input=x, weight=None, **PLAIN) == "Megatron's"
    for more in ({"gradient_accumulation_fusion": True}, {"grad_output_buffer": []}, {"gtp_remat_size": 2}):
        assert ours()._forward_impl(input=x, weight=None, **{**PLAIN, **more}) == "Megatron's"
    assert ours()._forward_impl(input=x, weight=None, **PLAIN).tolist() == [1.0, 1.0]
    assert ours()._forward_impl(input=x, weight=None, **{**PLAIN, "bias": torch.ones(2)}).tolist() == [2.0, 2.0]


@pytest.mark.parametrize(
    ("asked", "function"),
    [
        ("allreduce_dgrad", "copy_to_tensor_model_parallel_region"),
        ("sequence_parallel", "gather_from_sequence_parallel_region"),
    ],
)
def test_what_goes_between_ranks_goes_through_megatron(monkeypatch, asked, function):
    calls = []

    def through(x, **options):
        calls.append(options)
        return x + 10

    monkeypatch.setattr(linear, function, through)
    found = ours()._forward_impl(input=torch.zeros(1), weight=None, **{**PLAIN, asked: True, "tp_group": "group"})
    assert found.tolist() == [11.0]
    assert [options["group"] for options in calls] == ["group"]
