"""A study keeps what it saw, and says when runs differ."""

from dataclasses import replace

import pytest

from benchmarks.dynamics.arms import Study
from tests.unit.benchmarks.dynamics.runs import differing, study


def test_a_study_comes_back_from_disk_as_it_was(tmp_path):
    study().save(tmp_path / "new" / "freezing.json")
    assert Study.load(tmp_path / "new" / "freezing.json") == study()


def test_equal_means_every_bit_of_every_step():
    found = study()
    assert found.equal
    assert not differing().equal
    assert not replace(found, repeats_equal=False).equal
    arm = found.arms[3]
    assert not replace(found, arms=[*found.arms[:3], replace(arm, losses=arm.losses[:-1])]).equal


def test_a_study_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OSError, match="absent"):
        Study.load(tmp_path / "absent.json")
