"""The flags of `simulate`."""

import argparse

import pytest

from megatron_dyn.args import add_dyn_args
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.simulate_arguments import MODES, add_simulate_arguments, check_used
from megatron_dyn.cli.workloads import KINDS


def parser():
    made = argparse.ArgumentParser()
    add_simulate_arguments(made)
    return made


def test_the_policy_has_the_flags_and_defaults_of_a_run():
    run = vars(add_dyn_args(argparse.ArgumentParser()).parse_args([]))
    ours = vars(parser().parse_args([]))
    shared = ("min_gain", "horizon_steps", "cooldown_steps", "profile_interval", "profile_window", "profile_warmup")
    assert {name: ours[name] for name in shared} == {name: run[f"dyn_{name}"] for name in shared}


def test_help_names_every_kind():
    text = "".join(parser().format_help().split())
    assert all("".join(f"{name}: {kind.summary}".split()) in text for name, kind in KINDS.items())


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-gain", "1"], "--min-gain: expected a fraction in [0, 1), got '1'"),
        (["--min-gain", "nan"], "--min-gain: expected a fraction in [0, 1)"),
        (["--steps", "0"], "--steps: expected a whole number"),
        (["--steps", "1000001"], "--steps: expected a whole number from 1 to 1000000"),
        (["--pp", "16385"], "--pp: expected a whole number from 1 to 16384"),
        (["--micro-batches", "65537"], "--micro-batches: expected a whole number from 1 to 65536"),
        (["--layers", "100001"], "--layers: expected a whole number from 1 to 100000"),
        (["--micro-batch-size", "4,x"], "--micro-batch-size: expected a whole number"),
        (["--kind", "moa"], "--kind"),
        (["--algorithm", "best"], "--algorithm"),
    ],
)
def test_values_out_of_range_are_refused(capsys, words, told):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(words)
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_several_sizes_of_micro_batches():
    assert parser().parse_args(["--micro-batch-size", "4, 8"]).micro_batch_size == (4, 8)
    assert parser().parse_args([]).micro_batch_size == (1,)


def arguments(mode, value="x"):
    """What flags of a mode give: the mode's own argument, and nothing else."""
    return parser().parse_args([value] if mode == "trace" else [f"--{mode.replace('_', '-')}", value])


OTHER = {"rebalance": "off", "algorithm": "diffusion", "micro_batch_size": (4, 8), "allow_empty_stages": True}


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_takes_its_flags_and_no_other(mode):
    args = arguments(mode, "moe")
    check_used(args, mode)
    for name in vars(args).keys() - {*MODES, "json"}:
        changed = argparse.Namespace(**vars(args) | {name: OTHER.get(name, 7)})
        if name in MODES[mode].flags:
            check_used(changed, mode)
            continue
        with pytest.raises(InputError, match=f"^--{name.replace('_', '-')}.*: not with {MODES[mode].title}, only with "):
            check_used(changed, mode)


def test_every_flag_has_a_mode():
    taken = {name for mode in MODES.values() for name in mode.flags}
    assert vars(parser().parse_args([])).keys() == taken | {*MODES, "json"}


def test_a_refused_flag_is_repeated_as_it_was_given():
    args = argparse.Namespace(**vars(arguments("kind", "moe")) | {"micro_batch_size": (4, 8)})
    with pytest.raises(InputError, match="^--micro-batch-size 4,8: not with --kind, only with --resize$"):
        check_used(args, "kind")
    args = argparse.Namespace(**vars(arguments("kind", "moe")) | {"train_embedding": True})
    with pytest.raises(InputError, match="^--train-embedding: not with --kind, only with --freeze-schedule$"):
        check_used(args, "kind")
