"""The argparse bridge: every flag reaches its place in DynConfig, and a bad value names its flag."""

import argparse

import pytest

from megatron_dyn.args import GROUP_TITLE, add_dyn_args, compose_providers, config_from_args
from megatron_dyn.config import ConfigError, DynConfig, ForcedLayout, RebalanceMode, TransportKind
from megatron_dyn.dynamics import add_family_flags


def parse(*words):
    return config_from_args(add_dyn_args(argparse.ArgumentParser()).parse_args(words))


def flags_of(parser):
    """All `--dyn-*` flags of a parser."""
    return {option for action in parser._actions for option in action.option_strings if option.startswith("--dyn-")}


PLACES = [
    ("--dyn-rebalance auto", lambda config: config.rebalance.mode, RebalanceMode.AUTO),
    ("--dyn-rebalance every:7", lambda config: config.rebalance.every_steps, 7),
    ("--dyn-rebalance at:3,9", lambda config: config.rebalance.at_steps, (3, 9)),
    ("--dyn-layout-at 5:Ett|tL", lambda config: config.layout_at, (ForcedLayout(iteration=5, text="Ett|tL"),)),
    ("--dyn-min-gain 0.5", lambda config: config.decide.min_gain, 0.5),
    ("--dyn-horizon-steps 9", lambda config: config.decide.horizon_steps, 9),
    ("--dyn-cooldown-steps 4", lambda config: config.decide.cooldown_steps, 4),
    ("--dyn-allow-empty-stages", lambda config: config.decide.allow_empty_stages, True),
    ("--dyn-stage-memory-gib 1.5", lambda config: config.decide.stage_memory_bytes, 3 * 2**29),
    ("--dyn-layout-from-checkpoint", lambda config: config.layout_from_checkpoint, True),
    ("--no-dyn-layout-from-checkpoint", lambda config: config.layout_from_checkpoint, False),
    ("--dyn-algorithm diffusion", lambda config: config.decide.algorithm, "diffusion"),
    ("--dyn-cost-changes-at 7,90", lambda config: config.decide.cost_changes_at, (7, 90)),
    ("--dyn-shrink-policy throughput:0.1", lambda config: config.shrink.text, "throughput:0.1"),
    ("--dyn-profile-interval 6", lambda config: config.measure.interval_steps, 6),
    ("--dyn-profile-window 5", lambda config: config.measure.window_samples, 5),
    ("--dyn-profile-warmup 0", lambda config: config.measure.warmup_steps, 0),
    ("--dyn-exact-grad-norm", lambda config: config.exact_grad_norm, True),
    ("--no-dyn-exact-grad-norm", lambda config: config.exact_grad_norm, False),
    ("--dyn-rng-per-layer", lambda config: config.rng_per_layer, True),
    ("--dyn-report-dir /tmp/x", lambda config: config.report_dir, "/tmp/x"),
    ("--dyn-report-dir /tmp/x --dyn-record-losses", lambda config: config.record_losses, True),
    ("--dyn-transport gloo-copy", lambda config: config.transport, TransportKind.GLOO_COPY),
    ("--dyn-migrate-bucket-bytes 4096", lambda config: config.bucket_bytes, 4096),
    ("--dyn-timeout-seconds 2.5", lambda config: config.timeout_seconds, 2.5),
]

BAD = [
    ("--dyn-rebalance sometimes", "sometimes"),
    ("--dyn-rebalance every:0", "got 0"),
    ("--dyn-rebalance at:9,3", "[9, 3]"),
    ("--dyn-rebalance at:0", "[0]"),
    ("--dyn-layout-at Ett|tL", "'Ett|tL'"),
    ("--dyn-layout-at 9:Ett|tL;3:Et|ttL", "[9, 3]"),
    ("--dyn-layout-at 9:Ett|tL;", "''"),
    ("--dyn-min-gain 1.0", "1.0"),
    ("--dyn-min-gain -0.1", "-0.1"),
    ("--dyn-min-gain nan", "nan"),
    ("--dyn-horizon-steps 0", "got 0"),
    ("--dyn-cooldown-steps -1", "got -1"),
    ("--dyn-stage-memory-gib 0", "got 0"),
    ("--dyn-stage-memory-gib -2", "got -2"),
    ("--dyn-stage-memory-gib nan", "got nan"),
    ("--dyn-stage-memory-gib inf", "got inf"),
    ("--dyn-cost-changes-at x", "expected N1,N2,... (steps), got 'x'"),
    ("--dyn-cost-changes-at 9,9", "expected ascending steps of at least 1, got [9, 9]"),
    ("--dyn-shrink-policy big", "expected off, throughput:TOL, efficiency or memory, got 'big'"),
    ("--dyn-shrink-policy throughput:1", "expected a TOL in [0, 1), got 1.0"),
    ("--dyn-profile-interval 0", "got 0"),
    ("--dyn-profile-window 0", "got 0"),
    ("--dyn-profile-warmup -1", "got -1"),
    ("--dyn-migrate-bucket-bytes 0", "got 0"),
    ("--dyn-record-losses", "needs --dyn-report-dir"),
    ("--dyn-timeout-seconds 0", "got 0"),
    ("--dyn-timeout-seconds nan", "got nan"),
    ("--dyn-timeout-seconds inf", "got inf"),
]


@pytest.mark.parametrize(("words", "place", "expected"), PLACES, ids=[words for words, _, _ in PLACES])
def test_every_flag_reaches_its_place(words, place, expected):
    assert place(parse(*words.split())) == expected


def test_no_flag_is_without_a_test_of_its_place():
    # --dyn-device is read by the entry script before there is a config.
    tested = {word for words, _, _ in PLACES for word in words.split() if word.startswith("--dyn-")}
    families = argparse.ArgumentParser()
    # Tested family by family, in tests/unit/dynamics.
    add_family_flags(families)
    assert flags_of(add_dyn_args(argparse.ArgumentParser())) - flags_of(families) - tested == {"--dyn-device"}


def test_without_flags_the_defaults_are_those_of_the_config_and_nothing_is_on():
    assert parse() == DynConfig()
    assert not parse().active


@pytest.mark.parametrize(("words", "told"), BAD, ids=[words for words, _ in BAD])
def test_a_bad_value_is_one_line_that_names_its_flag_and_the_value(words, told):
    with pytest.raises(ConfigError) as caught:
        parse(*words.split())
    message = str(caught.value)
    assert message.startswith(words.split()[0])
    assert told in message
    assert "\n" not in message


@pytest.mark.parametrize("words", ["--dyn-min-gain much", "--dyn-horizon-steps 1.5", "--dyn-device tpu"])
def test_a_value_of_another_type_is_refused_by_the_parser_with_its_flag(words, capsys):
    with pytest.raises(SystemExit):
        parse(*words.split())
    assert words.split()[0] in capsys.readouterr().err


def test_the_flags_have_a_help_group_of_their_own_and_every_flag_has_a_help_text():
    parser = add_dyn_args(argparse.ArgumentParser())
    assert f"{GROUP_TITLE}:" in parser.format_help()
    (group,) = [group for group in parser._action_groups if group.title == GROUP_TITLE]
    assert {option for action in group._group_actions for option in action.option_strings} >= flags_of(parser)
    assert [action.dest for action in group._group_actions if not action.help] == []


def test_providers_are_composed_in_order_and_return_the_parser():
    parser = argparse.ArgumentParser()

    def own_flags(given):
        given.add_argument("--corpus")

    assert compose_providers(add_dyn_args, own_flags)(parser) is parser
    args = parser.parse_args(["--corpus", "a.txt", "--dyn-rebalance", "auto"])
    assert (args.corpus, config_from_args(args).rebalance.active) == ("a.txt", True)
