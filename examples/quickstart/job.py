"""Starts a training job under torchrun as a user would, and shows of its output what a reader wants to see.

Used by the quickstart and by the other examples. Imports nothing of the plugin.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
_START_OF_TRAINING = "[before the start of training step]"
_START_OF_NOISE = (
    "Number of ",
    "Total number of ",
    "compute_",
    "Activation memory",
    "Theoretical",
    "[Rank ",
    "Overwriting",
    "Params for",
)


def torchrun(num_ranks: int, flags: Sequence[str]) -> list[str]:
    """The command that trains on `num_ranks` processes of this machine with these flags."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*launcher, str(ROOT / "pretrain_gpt_dynamic.py"), *flags]


def train(command: Sequence[str], log_path: Path, console: Console) -> int:
    """Run the job and return its exit code; everything goes to the log, what a reader wants to see also to the console."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1", "COLUMNS": "110"}
    with log_path.open("w", encoding="utf-8") as log:
        job = subprocess.Popen(
            command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        assert job.stdout is not None, "the pipe asked for is there"
        for line in _worth_seeing(job.stdout, log):
            console.print(line, markup=False, highlight=False)
        return job.wait()


def _worth_seeing(lines: Iterator[str], log: IO[str]) -> Iterator[str]:
    """Log every line; yield the training lines, shortened, and the plugin's own."""
    training = False
    for line in lines:
        log.write(line)
        text = line.rstrip()
        training = training or text.startswith(_START_OF_TRAINING)
        if not training:
            if text.startswith(("dynamic balancing", "megatron_dyn")):
                yield text
        elif "elapsed time per iteration" in text:
            yield _shorten(text)
        elif text and not text.startswith((*_START_OF_NOISE, _START_OF_TRAINING, "WARNING:", "INFO:", "[after ", "\t", " ")):
            yield text


def _shorten(line: str) -> str:
    """Iteration, time and loss of one of Megatron's log lines."""
    fields = [field.strip() for field in line.split("|")]
    step = fields[0].rpartition("iteration")[2].replace(" ", "")
    wanted = {name: value for name, _, value in (field.partition(":") for field in fields[1:])}
    seconds = float(wanted["elapsed time per iteration (ms)"]) / 1e3
    return f"step {step:>7}   {seconds:6.3f} s   loss {float(wanted['lm loss']):.4f}"


def save_picture(console: Console, path: Path, title: str) -> None:
    """Write the console as an SVG; without the web font that rich names, so that the file needs nothing from outside."""
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title=title), flags=re.DOTALL)
    picture = picture.replace("Fira Code", "DejaVu Sans Mono")
    path.write_text(picture, encoding="utf-8")
