"""ChangeLog: what a family did, on the console and as a line of JSON."""

import io
import json

import pytest
from rich.console import Console

from megatron_dyn.ports import Change
from megatron_dyn.report import ChangeLog, ReportError

FROZEN = Change(family="freeze", iteration=7, what="layers 0-1 frozen", details={"layers": [0, 1]})


def console():
    return Console(file=io.StringIO(), width=30)


def test_a_change_is_one_line_on_the_console_and_one_of_json(tmp_path):
    shown = console()
    log = ChangeLog(str(tmp_path), shown)
    log.write(FROZEN)
    log.close()
    assert shown.file.getvalue() == "[megatron_dyn] after step 7: freeze: layers 0-1 frozen\n"
    assert json.loads((tmp_path / "dynamics.jsonl").read_text()) == {
        "iteration": 7,
        "family": "freeze",
        "what": "layers 0-1 frozen",
        "changes_costs": True,
        "layers": [0, 1],
    }


def test_lines_of_an_earlier_run_stay(tmp_path):
    for _ in range(2):
        log = ChangeLog(str(tmp_path), console())
        log.write(FROZEN)
        log.close()
    assert len((tmp_path / "dynamics.jsonl").read_text().splitlines()) == 2


def test_without_a_directory_there_is_the_console_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    log = ChangeLog(None, console())
    log.write(FROZEN)
    log.close()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_names_its_flag(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ReportError, match="--dyn-report-dir"):
        ChangeLog(str(tmp_path / "file"), console())


def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    log = ChangeLog(str(tmp_path), console())

    class Full:
        def write(self, text):
            raise OSError("no space left")

    log._file = Full()
    log.write(FROZEN)
    assert "no space left" in caplog.text
