"""Names the machine under a table, since a number without its machine says nothing."""

import os
import platform
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


def describe() -> str:
    """Processor, cores this process may use, Python and torch."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        names = [line.partition(":")[2].strip() for line in cpu_info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, Python {platform.python_version()}, torch {torch.__version__}, one thread per rank"


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print one table with the machine's name below it."""
    table = Table(title=title, caption=describe(), title_justify="left", caption_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
