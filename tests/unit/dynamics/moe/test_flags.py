"""Flags of mixture of experts: each reaches its setting, and one without anything to act on is refused."""

import argparse

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.moe.flags import add_flags, is_on
from megatron_dyn.dynamics.moe.settings import Assignment, MoeSettings, Routing, settings_from_args


def parse(words):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_args(words.split())


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--dyn-moe", MoeSettings(record=True)),
        ("--dyn-moe --dyn-moe-interval 3", MoeSettings(record=True, interval_steps=3)),
        ("--dyn-moe-routing s-base", MoeSettings(routing=Routing.S_BASE)),
        (
            "--dyn-moe-routing s-base --dyn-moe-assignment auction",
            MoeSettings(routing=Routing.S_BASE, assignment=Assignment.AUCTION),
        ),
        (
            "--dyn-moe --dyn-moe-routing loss-free --dyn-moe-bias-rate 0.5",
            MoeSettings(record=True, routing=Routing.LOSS_FREE, bias_rate=0.5),
        ),
        (
            "--dyn-moe-routing expert-choice --dyn-moe-capacity-factor 2",
            MoeSettings(routing=Routing.EXPERT_CHOICE, capacity_factor=2.0),
        ),
    ],
)
def test_flags_reach_their_settings(words, settings):
    args = parse(words)
    assert is_on(args)
    assert settings_from_args(args) == settings


def test_without_a_flag_the_family_is_off():
    assert not is_on(parse(""))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--dyn-moe-routing loss-free --dyn-moe-bias-rate 0", "--dyn-moe-bias-rate: expected a finite number above 0, got 0"),
        ("--dyn-moe-routing loss-free --dyn-moe-bias-rate nan", "--dyn-moe-bias-rate: expected a finite"),
        ("--dyn-moe-routing expert-choice --dyn-moe-capacity-factor 0", "--dyn-moe-capacity-factor: expected a finite"),
        ("--dyn-moe-routing expert-choice --dyn-moe-capacity-factor inf", "--dyn-moe-capacity-factor: expected a finite"),
        ("--dyn-moe --dyn-moe-interval 0", "--dyn-moe-interval: expected at least 1 step, got 0"),
        ("--dyn-moe-interval 5", "--dyn-moe-interval 5: expected it together with --dyn-moe"),
        ("--dyn-moe-assignment auction", "--dyn-moe-assignment auction: expected it together with --dyn-moe-routing s-base"),
        ("--dyn-moe --dyn-moe-bias-rate 1", "--dyn-moe-bias-rate 1.0: expected it together with --dyn-moe-routing loss-free"),
        (
            "--dyn-moe-routing s-base --dyn-moe-capacity-factor 1",
            "--dyn-moe-capacity-factor 1.0: expected it together with --dyn-moe-routing expert-choice, "
            "got --dyn-moe-routing s-base",
        ),
    ],
)
def test_bad_values_and_options_without_their_router_are_refused(words, told):
    args = parse(words)
    assert is_on(args)
    with pytest.raises(ConfigError) as error:
        settings_from_args(args)
    assert told in str(error.value)


def test_every_help_text_ends_with_its_default():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    own = [action for action in parser._actions if action.dest.startswith("dyn_")]
    assert len(own) == 6
    assert all("Default: " in action.help.split(". ")[-1] for action in own)
