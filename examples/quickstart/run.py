"""The quickstart: real text, unmodified Megatron, two pipeline stages, one automatic rebalance, and what it was worth.

    make quickstart            (or: python examples/quickstart/run.py [--input FILE ...] [--steps N])

Builds the corpus, starts `pretrain_gpt_dynamic.py` under torchrun on two ranks with a vocabulary that makes the last stage
heavy, shows the training lines and the plugin's tables, and sums up from the report files. It uses the command line that a
user would type; it imports nothing of the plugin.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from corpus import CorpusError, build_corpus
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
NUM_STAGES = 2
VOCAB_SIZE = 8000
# Sizes for two CPU cores. The vocabulary is padded to 16,384 rows, so that norm, head and loss weigh about five of these
# layers and the uniform split is a bad one, as with the large vocabularies of real models.
MODEL_FLAGS = (
    "--num-layers 8 --hidden-size 128 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-warmup-iters 4 --lr-decay-style cosine "
    "--make-vocab-size-divisible-by 16384 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0 "
    f"--pipeline-model-parallel-size {NUM_STAGES}"
).split()
# Sampled densely and decided once, since the run is short; a real job keeps the defaults.
DYN_FLAGS = shlex.split(
    "--dyn-rebalance auto --dyn-profile-interval 2 --dyn-profile-window 4 --dyn-cooldown-steps 100 --dyn-record-losses"
)
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


def main() -> int:
    """Run the quickstart; 0 when a move was made and the measured step became faster."""
    options = _parse()
    console = Console(record=True, width=110)
    out = Path(options.out)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            corpus = build_corpus(options.input, out / "corpus", VOCAB_SIZE, progress=progress)
    except CorpusError as error:
        sys.stderr.write(f"quickstart: error: {error}\n")
        return 2
    console.print(f"corpus: {corpus.num_documents:,} documents, {corpus.num_tokens:,} tokens in {corpus.data_prefix.parent}")
    report = out / "report"
    for old in report.glob("*.jsonl"):
        old.unlink()
    command = _command(options, [*corpus.megatron_flags, "--dyn-report-dir", str(report)])
    console.print(f"$ {shlex.join(command)}", soft_wrap=True, highlight=False)
    exit_code = _train(command, out / "train.log", console)
    if exit_code:
        sys.stderr.write(f"quickstart: error: training ended with exit code {exit_code}; see {out / 'train.log'}\n")
        return exit_code
    faster = _sum_up(report, console)
    _save_picture(console, out / "quickstart.svg")
    console.print(f"full log: {out / 'train.log'}   report: {report}   picture: {out / 'quickstart.svg'}", soft_wrap=True)
    return 0 if faster else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--input", action="append", default=[], metavar="FILE", help="text or JSONL instead of the built-in")
    parser.add_argument("--steps", type=int, default=30, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--out", default=str(ROOT / "build" / "quickstart"), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps: expected at least 1, got {options.steps}")
    return options


def _command(options: argparse.Namespace, more: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(NUM_STAGES)]
    entry = str(ROOT / "pretrain_gpt_dynamic.py")
    return [*launcher, entry, *MODEL_FLAGS, "--train-iters", str(options.steps), *more, *DYN_FLAGS]


def _train(command: list[str], log_path: Path, console: Console) -> int:
    """Run the job; everything goes to the log, what a reader wants to see also to the console."""
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


def _save_picture(console: Console, path: Path) -> None:
    """The console as an SVG; without the web font that rich names, so that the file needs nothing from outside."""
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="make quickstart"), flags=re.DOTALL)
    picture = picture.replace("Fira Code", "DejaVu Sans Mono")
    path.write_text(picture, encoding="utf-8")


def _sum_up(report: Path, console: Console) -> bool:
    rounds = [json.loads(line) for line in (report / "rounds.jsonl").read_text().splitlines()]
    losses = [json.loads(line) for line in (report / "losses.jsonl").read_text().splitlines()]
    moves = [line for line in rounds if line["outcome"] == "commit" and line["measured_after_seconds"]]
    if not moves:
        console.print("no move was made; the reasons:", *(line["reason"] for line in rounds), sep="\n  ")
        return False
    before, after = moves[0]["measured_before_seconds"], moves[-1]["measured_after_seconds"]
    table = Table(title="what it was worth", title_justify="left")
    for column in ("", "uniform start", "after the moves"):
        table.add_column(column)
    table.add_row("layout", moves[0]["layout_before"], moves[-1]["layout_after"])
    table.add_row("step time, measured", f"{before:.3f} s", f"{after:.3f} s  ({before / after:.2f} times as fast)")
    tokens = moves[0]["tokens_per_second_before"], moves[-1]["tokens_per_second_after"]
    table.add_row("tokens per second", f"{tokens[0]:,.0f}", f"{tokens[1]:,.0f}")
    overhead = sum(line["measuring_seconds"] + line["deciding_seconds"] + line["moving_seconds"] for line in rounds)
    table.add_row("measuring, deciding, moving", "", f"{overhead:.2f} s in all")
    first, last = (float.fromhex(line["losses"]["lm loss"]) for line in (losses[0], losses[-1]))
    table.add_row("loss", f"{first:.3f} (first step)", f"{last:.3f} (step {losses[-1]['iteration']})")
    console.print(table)
    if after >= before:
        console.print("the step did not become faster: another program kept the cores busy, or they share one; try again")
    return bool(after < before)


if __name__ == "__main__":
    sys.exit(main())
