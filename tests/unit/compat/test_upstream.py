"""Megatron-LM's tests three times, on a made-up checkout with three tests and a stand-in for the plugin."""

import re

import pytest

from compat import upstream
from tests.contract.source_tree import ROOT

# In force when on: it hurts the test that asks for it, once told to.
PLUGIN = """
import json, os, pathlib, sys

def pytest_addoption(parser):
    parser.addoption("--dyn-mode")
    parser.addoption("--dyn-record", type=pathlib.Path)

def pytest_unconfigure(config):
    mode = config.getoption("--dyn-mode")
    rows = ["a:b"] if mode == {when!r} else []
    record = {{"mode": mode, "rows": rows, "lost": [], "megatron": os.path.join(os.getcwd(), "megatron", "core")}}
    config.getoption("--dyn-record").write_text(json.dumps(record))

def pytest_configure(config):
    sys.made_up_harm = config.getoption("--dyn-mode") == {hurts!r}
"""
TESTS = """
import sys, pytest

def test_plain():
    pass

def test_hurt_by_the_plugin():
    assert not getattr(sys, "made_up_harm", False)

@pytest.mark.skip
def test_skipped():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    files = {
        "megatron/core/package_info.py": "MAJOR = 0\nMINOR = 19\nPATCH = 1\n",
        "tests/unit_tests/test_a.py": TESTS,
        "allowed.toml": 'release = "0.19"\nfolder = "tests/unit_tests"\n[passed]\n"test_a.py" = 2\n',
    }
    for name, text in files.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "checkout"


def compare(checkout, *, hurts="", when="on"):
    (checkout / "stand_in.py").write_text(PLUGIN.format(hurts=hurts, when=when))
    return upstream.main(
        [str(checkout)], allow_list=checkout / "allowed.toml", plugin="stand_in", out=checkout.parent / "build"
    )


def test_three_equal_runs_are_equal(checkout, capsys):
    assert compare(checkout) == 0
    told = capsys.readouterr().out
    assert "3 tests of Megatron-LM end in the same way: stock, off, on" in told
    assert re.search(r"test_a\.py +\S 2 +\S 2 passed, 1 skipped \S same \S same", told)


def test_a_test_that_the_plugin_breaks_is_named_and_so_is_too_small_a_stock_run(checkout, capsys):
    allowed = checkout / "allowed.toml"
    allowed.write_text(allowed.read_text().replace("= 2", "= 3"))
    assert compare(checkout, hurts="on") == 1
    assert [line for line in capsys.readouterr().out.splitlines() if "error:" in line] == [
        "test-upstream: error: stock: tests/unit_tests/test_a.py: expected 3 passed, actual 2",
        "test-upstream: error: on: tests/unit_tests/test_a.py::test_hurt_by_the_plugin: passed, now failed",
    ]


def test_a_run_that_was_not_what_it_says_is_no_comparison(checkout, capsys):
    assert compare(checkout, when="off") == 2
    assert "off: expected rows of the ledger in force only when on, actual ['a:b']" in capsys.readouterr().out


def test_a_run_that_does_not_get_to_its_end_is_no_comparison(checkout, capsys):
    (checkout / "tests" / "unit_tests" / "test_a.py").write_text("import no_such_module\n")
    assert compare(checkout) == 2
    assert "stock: expected pytest to end with exit code 0 or 1, actual 2; see" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "expected a checkout of Megatron-LM, actual"),
        ("MAJOR = 0\nMINOR = 18\n", "expected a checkout of release 0.19 (tag core_v0.19.0), actual 0.18"),
        ("__version__ = '0.19.2'\n", "actual ?.?"),
    ],
)
def test_what_is_no_checkout_of_the_release_is_refused_in_one_line(checkout, capsys, text, told):
    info = checkout / "megatron" / "core" / "package_info.py"
    info.unlink() if text is None else info.write_text(text)
    assert compare(checkout) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("test-upstream: error: MEGATRON_LM: ")
    assert told in line


def test_a_checkout_without_a_listed_test_is_refused(checkout, capsys):
    (checkout / "tests" / "unit_tests" / "test_a.py").unlink()
    assert compare(checkout) == 2
    assert "missing in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({}, None),
        ({"rows": []}, "actual []"),
        ({"lost": ["a:b"]}, "lost ['a:b']"),
        ({"mode": "off"}, "in force only when on"),
        ({"megatron": "/elsewhere/megatron/core/__init__.py"}, "expected the Megatron of"),
    ],
)
def test_the_plugin_has_to_be_in_force_in_the_checkouts_megatron(tmp_path, changed, told):
    record = {"mode": "on", "rows": ["a:b"], "lost": [], "megatron": str(tmp_path / "megatron" / "core" / "__init__.py")}
    if told is None:
        upstream.check_record("on", record | changed, tmp_path)
        return
    with pytest.raises(upstream.UpstreamError, match=re.escape(told)):
        upstream.check_record("on", record | changed, tmp_path)


def test_the_allow_list_is_of_the_pinned_release():
    allowed = upstream.read_allow_list(upstream.ALLOW_LIST)
    assert f"megatron-core=={allowed.release}." in (ROOT / "constraints.txt").read_text()
    assert sum(allowed.passed.values()) == 1054
    assert list(allowed.passed) == sorted(allowed.passed)
