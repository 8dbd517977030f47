"""Settings from arguments: defaults that follow from the run's length and the pattern, and every refusal with its flag."""

from types import SimpleNamespace

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.settings import KernelChoice, PruneSettings, Scope, given_options


def settings(train_iters=1000, **options):
    given = {f"dyn_prune_{name}": value for name, value in options.items()}
    return PruneSettings.from_args(SimpleNamespace(train_iters=train_iters, **given))


def test_bare_settings_suit_any_run():
    made = settings()
    schedule = made.schedule
    assert (schedule.start, schedule.end, schedule.every, schedule.initial, schedule.final) == (100, 700, 30, 0.0, 0.9)
    assert (made.scope, made.pattern.text, made.exclude, made.kernels) == (Scope.GLOBAL, "unstructured", (), KernelChoice.AUTO)


@pytest.mark.parametrize("train_iters", [1, 2, 7, 10, 19])
def test_the_shortest_runs_have_a_schedule_too(train_iters):
    schedule = settings(train_iters).schedule
    assert 0 <= schedule.start < schedule.end <= train_iters
    assert schedule.steps[-1] == schedule.end


def test_n_of_m_ends_at_what_it_prunes():
    assert settings(pattern="2:4").schedule.final == 0.5
    assert settings(pattern="1:4", final=0.75).schedule.final == 0.75


def test_names_are_read_with_commas():
    assert settings(exclude="linear_proj, experts,,linear_proj").exclude == ("experts", "linear_proj")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"final": 1.0}, r"--dyn-prune-final: expected a share in \(0, 1\), got 1"),
        ({"final": 0.0}, "--dyn-prune-final"),
        ({"final": -0.1}, "--dyn-prune-final"),
        ({"final": float("nan")}, "--dyn-prune-final"),
        ({"final": 0.9, "pattern": "2:4"}, "--dyn-prune-final: expected 0.5 with --dyn-prune-pattern 2:4, got 0.9"),
        ({"initial": 0.95}, "--dyn-prune-initial"),
        ({"initial": -0.1}, "--dyn-prune-initial"),
        ({"start": -1}, "--dyn-prune-start"),
        ({"start": 50, "end": 50}, "--dyn-prune-end: expected a step after --dyn-prune-start 50, got 50"),
        ({"end": 1001}, "--dyn-prune-end: expected at most --train-iters 1000, got 1001"),
        ({"every": 0}, "--dyn-prune-every"),
        ({"pattern": "4:2"}, "--dyn-prune-pattern"),
        ({"exclude": "linear_qkv,router"}, "--dyn-prune-exclude: expected names out of .*, got router"),
        ({"train_iters": None}, "--dyn-prune: expected --train-iters"),
    ],
)
def test_what_cannot_be_is_refused_with_its_flag(options, message):
    with pytest.raises(ConfigError, match=message):
        settings(**options)


def test_options_are_told_from_defaults():
    args = SimpleNamespace(dyn_prune_final=0.0, dyn_prune_scope=None)
    assert given_options(args) == ["--dyn-prune-final"]
