"""The release under test is the pinned one, and a quickstart that did not do all of its work is noticed."""

import pytest

from compat import release
from tests.contract.source_tree import ROOT


@pytest.fixture
def complete(tmp_path):
    """The folder of a quickstart that ran to its end."""
    (tmp_path / "report").mkdir()
    (tmp_path / "report" / "losses.jsonl").write_text("{}\n" * release.NUM_STEPS)
    (tmp_path / "report" / "rounds.jsonl").write_text("{}\n")
    (tmp_path / "quickstart.svg").touch()
    return tmp_path


@pytest.mark.parametrize(("name", "version"), [("0.17", "0.17.1"), ("0.18", "0.18.2")])
def test_the_version_is_that_of_the_lock(name, version):
    assert release.pinned_version(name) == version


@pytest.mark.parametrize(
    "text", [None, "torch==2.13.0\n", "megatron-core==0.19.2\n", "megatron-core==0.17.1\nmegatron-core==0.17.0\n"]
)
def test_a_lock_that_does_not_pin_the_release_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "megatron-core-0.17.lock").write_text(text)
    with pytest.raises(ValueError, match=r"megatron-core-0\.17\.lock: expected one pin of megatron-core 0\.17, actual"):
        release.pinned_version("0.17", tmp_path)


@pytest.mark.parametrize("code", [0, 1])
def test_a_quickstart_that_ran_to_its_end_is_good_however_fast_the_machine_was(complete, code):
    assert release.quickstart_complaint(code, complete) is None


def test_a_quickstart_that_failed_is_told(complete):
    assert "actual exit code 2" in release.quickstart_complaint(2, complete)
    (complete / "quickstart.svg").unlink()
    assert "actual exit code 1" in release.quickstart_complaint(1, complete)


@pytest.mark.parametrize(("name", "expected"), [("losses.jsonl", release.NUM_STEPS), ("rounds.jsonl", 1)])
def test_a_quickstart_without_all_of_its_reports_is_told(complete, name, expected):
    (complete / "report" / name).write_text("{}\n" * (expected - 1))
    told = release.quickstart_complaint(0, complete)
    assert told == f"{complete / 'report' / name}: expected at least {expected} lines, actual {expected - 1}"
    (complete / "report" / name).unlink()
    assert "actual 0" in release.quickstart_complaint(0, complete)


def test_every_supported_release_but_the_pinned_one_has_a_lock():
    """The range in pyproject.toml promises what nothing tests otherwise."""
    assert [path.name for path in sorted((ROOT / "compat").glob("megatron-core-*.lock"))] == [
        "megatron-core-0.17.lock",
        "megatron-core-0.18.lock",
    ]
    assert '"megatron-core>=0.17,<0.20"' in (ROOT / "pyproject.toml").read_text()
