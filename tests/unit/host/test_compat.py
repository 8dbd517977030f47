"""Which releases are supported, and how a release that is not, or that lacks something, is told: in one line."""

import functools
import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

import megatron_dyn
from megatron_dyn.host import compat
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.16.1", False),
        ("0.17.0", True),
        ("0.18.0rc1", True),
        ("0.19.2", True),
        ("0.20.0", False),
        ("1.0.0", False),
        ("unknown", False),
    ],
)
def test_supported_range(version, expected):
    assert compat.is_supported(version) is expected


def test_the_installed_release_is_supported():
    # In a rank, which finds Megatron imported: here it would be imported for this test alone.
    (version,) = run_ranks(compat.check_version, 1)
    assert compat.is_supported(version)


def test_another_release_is_refused_with_range_and_version(monkeypatch):
    monkeypatch.setattr(compat, "megatron_version", lambda: "0.21.0")
    with pytest.raises(compat.HostError, match=r"expected 0\.17 <= megatron-core < 0\.20, actual 0\.21\.0"):
        compat.check_version()


def row(target, *parameters):
    return SimpleNamespace(target=target, parameters=parameters)


@pytest.fixture
def host(monkeypatch):
    """A module `made_up_host` with a function that takes `left` and `right`."""
    module = ModuleType("made_up_host")
    module.add = lambda left, right: left + right
    monkeypatch.setitem(sys.modules, "made_up_host", module)
    return module


def test_missing_symbols_and_parameters_are_listed_in_order_and_once(host):
    rows = [
        row("made_up_host:add", "left"),
        row("made_up_host:nothing"),
        row("made_up_host:add", "right", "group", "stream"),
        row("no_such_module:x"),
        row("made_up_host:nothing", "left"),
    ]
    assert compat.missing_from_host(rows) == ["made_up_host:nothing", "made_up_host:add(group, stream)", "no_such_module:x"]


def test_what_has_no_signature_lacks_every_parameter_and_a_wrapper_counts_as_what_it_wraps(host):
    assert compat.missing_parameters(3, ("left",)) == ["left"]
    wrapped = functools.wraps(host.add)(lambda *args, **options: 0)
    assert compat.missing_parameters(wrapped, ("left", "right")) == []


@pytest.mark.parametrize(
    ("version", "targets", "told"),
    [
        ("0.19.2", ["made_up_host:add"], None),
        ("0.16.1", ["made_up_host:add"], "actual 0.16.1"),
        ("0.20.0", ["made_up_host:gone"], "actual 0.20.0; missing in it: made_up_host:gone"),
        (
            "0.19.3",
            ["made_up_host:gone", "made_up_host:too"],
            "actual 0.19.3; missing in it: made_up_host:gone, made_up_host:too",
        ),
    ],
)
def test_an_unsupported_or_incomplete_host_is_refused_in_one_line(host, monkeypatch, version, targets, told):
    monkeypatch.setattr(compat, "megatron_version", lambda: version)
    rows = [row(target, "left") for target in targets]
    if told is None:
        assert compat.check_host(rows) == version
        return
    with pytest.raises(compat.HostError) as refused:
        compat.check_host(rows)
    assert str(refused.value) == f"megatron-core: expected 0.17 <= megatron-core < 0.20, {told}"


@pytest.mark.parametrize(
    ("name", "is_refused"), [("megatron.core.gone", True), ("megatron", True), ("megatron_other", False), (None, False)]
)
def test_import_errors_about_megatron_become_refusals_and_others_do_not(monkeypatch, name, is_refused):
    monkeypatch.setattr(compat, "megatron_version", lambda: "0.19.3")
    with pytest.raises(compat.HostError if is_refused else ImportError) as raised, compat.refused_by_name():
        raise ImportError("cannot import name 'x'", name=name)
    refusal = "megatron-core: expected 0.17 <= megatron-core < 0.20, actual 0.19.3; cannot import name 'x'"
    assert str(raised.value) == (refusal if is_refused else "cannot import name 'x'")


def test_the_public_name_refuses_a_host_that_our_own_imports_do_not_fit(monkeypatch):
    """`from megatron_dyn import install` in an entry script of one's own, with a Megatron that lacks a module."""

    def fail(name):
        if name == "megatron_dyn.installer":
            raise ModuleNotFoundError("No module named 'megatron.core.gone'", name="megatron.core.gone")
        return importlib.import_module(name)

    monkeypatch.setattr(compat, "megatron_version", lambda: "0.19.3")
    monkeypatch.setattr(megatron_dyn, "_import_module", fail)
    with pytest.raises(compat.HostError, match=r"actual 0\.19\.3; No module named 'megatron\.core\.gone'"):
        _ = megatron_dyn.install


def start_on_a_host_that_lacks(argv, lost):
    """Start the plugin's entry on a Megatron whose attribute `lost` is gone and whose `train_step` takes nothing."""
    module_name, _, path = lost.partition(":")
    *parents, name = path.split(".")
    owner = functools.reduce(getattr, parents, importlib.import_module(module_name))
    delattr(owner, name)
    importlib.import_module("megatron.training.training").train_step = lambda: None
    importlib.import_module("megatron_dyn.testing.training").train_with_plugin(argv)


@pytest.mark.parametrize(
    "lost",
    [
        "megatron.training.training:post_training_step_callbacks",
        # In force during sampled steps only: found at the start all the same.
        "megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
    ],
)
def test_a_supported_release_that_lost_something_is_refused_at_start_with_all_that_is_missing(lost):
    argv = tiny_gpt_arguments(pipeline_model_parallel_size=2, dyn_rebalance="auto")
    results = run_ranks(start_on_a_host_that_lacks, 2, argv, lost, expect_exit=True)
    assert [result.exitcode for result in results] == [2, 2]
    lines = [[line for line in result.output.splitlines() if "megatron-core" in line] for result in results]
    assert [len(told) for told in lines] == [1, 0]
    assert "megatron_dyn: error: megatron-core: expected 0.17 <= megatron-core < 0.20, actual 0." in lines[0][0]
    for missing in (lost, "megatron.training.training:train_step(model, optimizer)"):
        assert missing in lines[0][0].partition("; missing in it: ")[2]


def test_only_supported_options_are_passed_on():
    def function(first, *, second=0):
        return first, second

    assert compat.call_supported(function, 1, second=2, third=3) == (1, 2)
