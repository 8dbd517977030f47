"""`dynamics.jsonl`: what the dynamic families did to the model, one JSON object a line; and a line of each on the console."""

import json
import logging

from rich.console import Console
from rich.text import Text

from megatron_dyn.ports import Change
from megatron_dyn.report.jsonl import open_lines

logger = logging.getLogger(__name__)


class ChangeLog:
    """One per job, on the rank that writes."""

    def __init__(self, directory: str | None, console: Console) -> None:
        """Open `directory`/dynamics.jsonl for appending; None: console only. Raises ReportError."""
        self._file = None if directory is None else open_lines(directory, "dynamics.jsonl")
        self._console = console

    def write(self, change: Change) -> None:
        """Record one change."""
        self._console.print(
            Text(f"[megatron_dyn] after step {change.iteration}: {change.family}: {change.what}"), soft_wrap=True
        )
        if self._file is None:
            return
        line = {
            "iteration": change.iteration,
            "family": change.family,
            "what": change.what,
            "changes_costs": change.changes_costs,
            **change.details,
        }
        try:
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as error:
            # A full disk must not end a run that trains well.
            logger.error("a change after step %d could not be recorded: %s", change.iteration, error)

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            self._file.close()
