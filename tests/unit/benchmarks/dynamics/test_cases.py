"""The cases fit themselves: flags that parse, schedules that meet the points, curves for every layer."""

import argparse
import importlib

import pytest

from benchmarks.dynamics.cases import CASES, layer_parameters
from megatron_dyn.args import add_dyn_args
from megatron_dyn.dynamics.registry import FAMILIES
from megatron_dyn.testing.training import tiny_gpt_arguments


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_case_switches_its_own_family_on(case):
    parser = add_dyn_args(argparse.ArgumentParser(allow_abbrev=False))
    args, unknown = parser.parse_known_args(tiny_gpt_arguments(**case.family))
    assert not [word for word in unknown if word.startswith("--dyn-")]
    on = [name for name in FAMILIES if importlib.import_module(f"megatron_dyn.dynamics.{name}.flags").is_on(args)]
    assert on == [case.name]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_groups_and_points_fit_the_model(case):
    assert case.model["num_layers"] == case.num_layers == len(case.layer_parameters)
    assert sorted(layer for ids in case.groups.values() for layer in ids) == list(range(case.num_layers))
    assert case.num_steps % case.every_steps == 0
    assert case.every_steps >= 5, "a point needs steps to warm up, and one to spare"
    assert case.tokens_per_step == case.model["global_batch_size"] * 128


def test_parameters_of_a_layer():
    assert layer_parameters(10) == 1200
    assert layer_parameters(10, num_experts=8) == 400 + 8 * 800 + 80
