"""How commands speak: tables and lines on stdout, JSON alone on stdout, progress on stderr if that is a terminal.

Shared by all commands; knows none of them.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from megatron_dyn.cli.errors import InputError

_PIPE_COLUMNS = 160
"""Where no terminal says how wide it is: folding a table at 80 columns would make logs and pipes unreadable."""


def console() -> Console:
    """Stdout as it is now. Text goes in as it is: a layout or a path must not be read as rich markup."""
    width = None if sys.stdout.isatty() else _PIPE_COLUMNS
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def say(*lines: str) -> None:
    """Write lines to stdout; none is folded, so that a long layout can be copied in one piece."""
    for line in lines:
        console().print(Text(line), soft_wrap=True)


def warn(*lines: str) -> None:
    """Write lines to stderr, each with the name of the command."""
    sys.stderr.write("".join(f"megatron-dyn: note: {line}\n" for line in lines))


def write_json(data: Mapping[str, Any]) -> None:
    """Write `data` and nothing else to stdout."""
    sys.stdout.write(json.dumps(data, indent=2, allow_nan=False) + "\n")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[str] = ()) -> Table:
    """A table; columns are right-aligned but for those named in `left`."""
    made = Table(title=title, title_justify="left")
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


@contextmanager
def progress(num_steps: int, what: str) -> Iterator[Callable[[str], None]]:
    """A progress bar on stderr that is gone when all is done; none where nobody sees it.

    Gives a function to be called with the name of each step before the step starts.
    """
    with _bar(num_steps, what) as (bar, task):
        begun = iter(range(num_steps + 1))
        yield lambda step: bar.update(task, completed=next(begun, num_steps), description=f"{what}: {step}")


@contextmanager
def countdown(num_steps: int, what: str) -> Iterator[Callable[[], None]]:
    """The same for steps without names: gives a function to be called after each step."""
    with _bar(num_steps, what) as (bar, task):
        yield lambda: bar.advance(task)


@contextmanager
def _bar(num_steps: int, what: str) -> Iterator[tuple[Progress, TaskID]]:
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        yield bar, bar.add_task(what, total=num_steps)


def spans(layers: Sequence[int]) -> str:
    """Ascending layer ids as text: `0-3, 8`, or `none`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def write_file(flag: str, path: str, content: str) -> None:
    """Write a text file; raises InputError naming the flag and the path."""
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{flag} {path}: cannot be written: {error.strerror or error}") from error
