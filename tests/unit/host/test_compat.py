"""Which releases are supported, and how a release that is not is told."""

import pytest

from megatron_dyn.host import compat
from megatron_dyn.testing.ranks import run_ranks


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


def test_missing_symbols_are_listed_in_order():
    targets = ["os:path.join", "os:nothing", "no_such_module:x", "os:getcwd"]
    assert compat.missing_symbols(targets) == ["os:nothing", "no_such_module:x"]


def test_only_supported_options_are_passed_on():
    def function(first, *, second=0):
        return first, second

    assert compat.call_supported(function, 1, second=2, third=3) == (1, 2)
