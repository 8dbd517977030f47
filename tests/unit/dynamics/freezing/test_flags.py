"""The flags of freezing, from the command line to the family."""

import argparse
from types import SimpleNamespace

import pytest

from megatron_dyn.args import add_dyn_args
from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics import families_from_args

CACHED = ("--dyn-freeze", "egeria", "--dyn-freeze-cache-gib", "1")
MEGATRON = {
    "num_layers": 8,
    "train_iters": 100,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "num_experts": None,
    "sequence_parallel": False,
    "context_parallel_size": 1,
}


def families(*words, **megatron):
    args = add_dyn_args(argparse.ArgumentParser()).parse_args(words)
    return families_from_args(SimpleNamespace(**vars(args), **{**MEGATRON, **megatron}))


def test_off_is_no_family():
    assert families() == ()


def test_known_steps_are_those_within_the_run():
    (family,) = families("--dyn-freeze", '{"0-3": [0, 40], "5": [60, 200]}')
    assert (family.name, family.freezes, family.keeps_layers_apart) == ("freeze", True, True)
    assert family.cost_changes() == (40, 60)
    assert families("--dyn-freeze", "egeria")[0].cost_changes() == ()


@pytest.mark.parametrize(
    ("words", "megatron", "told"),
    [
        (("--dyn-freeze", '{"9": 5}'), {}, "--dyn-freeze: '9': layer 9 is unknown"),
        (("--dyn-freeze", '{"1": [100, -1]}'), {}, "--dyn-freeze: expected starts before the end of the run at 100, got 100"),
        (CACHED, {"hidden_dropout": 0.1}, "--dyn-freeze-cache-gib: .*--hidden-dropout"),
        (CACHED, {"num_experts": 4}, "--dyn-freeze-cache-gib: .*--num-experts"),
        (CACHED, {"sequence_parallel": True}, "--sequence-parallel"),
    ],
)
def test_what_cannot_be_had_names_its_flag(words, megatron, told):
    with pytest.raises(ConfigError, match=told):
        families(*words, **megatron)
