"""The flags: every option is parsed, and none is taken silently without the switch."""

import argparse

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning import flags
from megatron_dyn.dynamics.pruning.settings import OPTIONS


def parse(*words):
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    return parser.parse_args(words)


def test_off_unless_asked_for():
    assert not flags.is_on(parse())
    assert flags.is_on(parse("--dyn-prune"))


def test_there_is_a_flag_for_every_option_and_each_says_its_default():
    parser = argparse.ArgumentParser()
    flags.add_flags(parser)
    helps = {action.dest: action.help for action in parser._actions if action.dest.startswith("dyn_")}
    assert helps.keys() == {"dyn_prune", *(f"dyn_prune_{name}" for name in OPTIONS)}
    assert all("Default: " in text and text.endswith(".") for text in helps.values())


@pytest.mark.parametrize("words", [("--dyn-prune-final", "0.5"), ("--dyn-prune-kernels", "csr"), ("--dyn-prune-start", "0")])
def test_an_option_without_the_switch_is_refused(words):
    with pytest.raises(ConfigError, match=f"{words[0]}: expected --dyn-prune beside it"):
        flags.is_on(parse(*words))
    assert flags.is_on(parse("--dyn-prune", *words))
