"""The quickstart: real text, unmodified Megatron, two pipeline stages, one automatic rebalance, and what it was worth.

    make quickstart            (or: python examples/quickstart/run.py [--input FILE ...] [--steps N])

Builds the corpus, starts `pretrain_gpt_dynamic.py` under torchrun on two ranks with a vocabulary that makes the last stage
heavy, shows the training lines and the plugin's tables, and sums up from the report files. It uses the command line that a
user would type; it imports nothing of the plugin.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path

from corpus import CorpusError, build_corpus
from job import ROOT, save_picture, torchrun, train
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

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
    command = torchrun(NUM_STAGES, _flags(options, [*corpus.megatron_flags, "--dyn-report-dir", str(report)]))
    console.print(f"$ {shlex.join(command)}", soft_wrap=True, highlight=False)
    exit_code = train(command, out / "train.log", console)
    if exit_code:
        sys.stderr.write(f"quickstart: error: training ended with exit code {exit_code}; see {out / 'train.log'}\n")
        return exit_code
    faster = _sum_up(report, console)
    save_picture(console, out / "quickstart.svg", "make quickstart")
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


def _flags(options: argparse.Namespace, more: list[str]) -> list[str]:
    return [*MODEL_FLAGS, "--train-iters", str(options.steps), *more, *DYN_FLAGS]


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
