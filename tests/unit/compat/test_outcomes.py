"""Reading how tests ended, from a junit file that pytest itself wrote, and comparing two runs."""

import subprocess
import sys

import pytest

from compat.outcomes import Outcomes, describe, differences, read_outcomes, shortfalls

TESTS = """
import pytest

@pytest.fixture
def breaks_before():
    raise RuntimeError

@pytest.fixture
def breaks_after():
    yield
    raise RuntimeError

@pytest.mark.parametrize("size", [1, 2])
def test_one(size):
    assert size == 1

class TestGroup:
    def test_skipped(self):
        pytest.skip("not today")

    class TestInner:
        def test_passed(self):
            pass

def test_before(breaks_before):
    pass

def test_after(breaks_after):
    pass

def test_fails_and_breaks_after(breaks_after):
    assert False
"""


def outcomes(**by_test):
    return Outcomes(by_test={name.replace("__", "::"): outcome for name, outcome in by_test.items()})


def test_every_way_to_end_is_read_under_the_name_that_pytest_takes(tmp_path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group" / "test_a.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-o", "junit_family=xunit1", "--junitxml", "junit.xml", "group"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=False, timeout=60)
    assert read_outcomes(tmp_path / "junit.xml").by_test == {
        "group/test_a.py::test_one[1]": "passed",
        "group/test_a.py::test_one[2]": "failed",
        "group/test_a.py::TestGroup::test_skipped": "skipped",
        "group/test_a.py::TestGroup::TestInner::test_passed": "passed",
        "group/test_a.py::test_before": "error",
        "group/test_a.py::test_after": "error",
        "group/test_a.py::test_fails_and_breaks_after": "error",
    }


def test_a_file_that_is_not_there_is_no_run_without_tests(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_outcomes(tmp_path / "junit.xml")


def test_equal_runs_do_not_differ_and_every_difference_is_named():
    stock = outcomes(a__x="passed", a__y="failed", a__z="skipped")
    assert differences(stock, outcomes(a__x="passed", a__y="failed", a__z="skipped")) == []
    assert differences(stock, outcomes(a__x="failed", a__y="passed", a__new="passed")) == [
        "a::new: absent, now passed",
        "a::x: passed, now failed",
        "a::y: failed, now passed",
        "a::z: skipped, now absent",
    ]


def test_counts_are_by_file_and_too_few_passes_are_told():
    found = outcomes(a__x="passed", a__y="failed", ab__x="passed", ab__y="passed")
    assert describe(found.counts()) == "3 passed, 1 failed"
    assert describe(found.counts("a")) == "1 passed, 1 failed"
    assert describe(found.counts("none")) == "none"
    assert shortfalls(found, {"a": 1, "ab": 2}) == []
    assert shortfalls(found, {"a": 2, "none": 1}) == [
        "a: expected 2 passed, actual 1",
        "none: expected 1 passed, actual 0",
    ]
