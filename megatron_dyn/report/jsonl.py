"""`rounds.jsonl` and `losses.jsonl`: one JSON object a line, handed to the system as soon as written."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from megatron_dyn.records import RoundReport
from megatron_dyn.report.flatten import flatten


class ReportError(OSError):
    """The report directory cannot be written; the message names the flag and the path."""


class JsonlSink:
    """Writes rounds. A round written again (its measured step time came in) replaces its line; all others only append."""

    def __init__(self, directory: str) -> None:
        """Open `directory`/rounds.jsonl, kept when it is there (a resumed job). Raises ReportError."""
        self._file = open_lines(directory, "rounds.jsonl")
        self._lines: dict[int, tuple[int, str]] = {}
        """By round of this process: where its line begins, and the line."""

    def write(self, report: RoundReport) -> None:
        """See ports.Sink."""
        text = json.dumps(flatten(report)) + "\n"
        start = self._lines.get(report.round, (self._file.seek(0, 2), ""))[0]
        later = [number for number in self._lines if number > report.round]
        self._file.seek(start)
        self._file.truncate()
        for number, line in [(report.round, text), *((number, self._lines[number][1]) for number in later)]:
            self._lines[number] = (self._file.tell(), line)
            self._file.write(line)
        self._file.flush()

    def close(self) -> None:
        """See ports.Sink."""
        self._file.close()


class LossLog:
    """Writes one line a step: losses and gradient norm in hex, and the layout in force."""

    def __init__(self, directory: str) -> None:
        """Open `directory`/losses.jsonl for appending. Raises ReportError."""
        self._file = open_lines(directory, "losses.jsonl")

    def write(self, iteration: int, losses: Mapping[str, float], grad_norm: float | None, layout: str) -> None:
        """Record one step; `grad_norm` is None when Megatron computed none (a skipped step)."""
        line: dict[str, Any] = {
            "iteration": iteration,
            "losses": {name: float(loss).hex() for name, loss in losses.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm).hex(),
            "layout": layout,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def check_directory(directory: str) -> None:
    """Raise ReportError now rather than at the first round when `directory` cannot be made or written."""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReportError(f"--dyn-report-dir {directory}: cannot be made: {error.strerror or error}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ReportError(f"--dyn-report-dir {directory}: cannot be written")


def open_lines(directory: str, name: str) -> IO[str]:
    """Open a text file of lines at its end, whole lines before it; makes the directory. Raises ReportError."""
    path = Path(directory) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        file = path.open("r+", encoding="utf-8")
        before = file.read()
        if before and not before.endswith("\n"):
            # A job that was killed while writing left half a line; the next one must not be glued to it.
            file.write("\n")
        return file
    except OSError as error:
        raise ReportError(f"--dyn-report-dir {directory}: cannot write {name}: {error.strerror or error}") from error
