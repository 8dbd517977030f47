"""What the examples of the dynamic families share: corpus, job, tables and picture. Each example says only what it trains.

It uses the command line that a user would type, and imports nothing of the plugin.
"""

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from corpus import CorpusError, build_corpus  # noqa: E402 - it lies beside the quickstart, whose folder comes first now
from job import ROOT, save_picture, torchrun, train  # noqa: E402
from picture import write_picture  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.progress import Progress  # noqa: E402
from rich.table import Table  # noqa: E402
from story import Story, read_story  # noqa: E402

NUM_STAGES = 2
VOCAB_SIZE = 2000
COMMON_FLAGS = shlex.split(
    "--num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 2 --lr 1e-3 "
    "--lr-warmup-iters 4 --lr-decay-style cosine --hidden-dropout 0 --attention-dropout 0 --log-interval 1 "
    "--eval-interval 1000 --eval-iters 0 --num-workers 0 --untie-embeddings-and-output-weights "
    f"--pipeline-model-parallel-size {NUM_STAGES}"
)
# Short windows, since the run is short; a real job keeps the defaults.
DYN_FLAGS = shlex.split("--dyn-rebalance auto --dyn-profile-window 3 --dyn-profile-warmup 1 --dyn-record-losses")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """One example."""

    name: str
    """Also the folder below build/ that it writes to."""
    title: str
    model_flags: str
    family_flags: Callable[[int], list[str]]
    """The flags of the family for a run of so many steps."""
    facts: Callable[[Story, Console], None] | None = None
    """What else to tell of this family."""


def main(demo: Demo) -> int:
    """Run the example; 0 when training went well, whether or not layers moved."""
    options = _parse(demo)
    console = Console(record=True, width=120)
    out = Path(options.out)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            corpus = build_corpus(options.input, ROOT / "build" / "corpus-small", VOCAB_SIZE, progress=progress)
    except CorpusError as error:
        sys.stderr.write(f"{demo.name}: error: {error}\n")
        return 2
    report, log = out / "report", out / "train.log"
    report.mkdir(parents=True, exist_ok=True)
    for old in report.glob("*.jsonl"):
        old.unlink()
    family = demo.family_flags(options.steps)
    console.print(f"{demo.title}: {shlex.join(family)}", soft_wrap=True, highlight=False)
    model = [*shlex.split(demo.model_flags), *COMMON_FLAGS, "--train-iters", str(options.steps), *corpus.megatron_flags]
    command = torchrun(NUM_STAGES, [*model, *family, *DYN_FLAGS, "--dyn-report-dir", str(report)])
    if exit_code := train(command, log, console):
        sys.stderr.write(f"{demo.name}: error: training ended with exit code {exit_code}; see {log}\n")
        return exit_code
    story = read_story(report, log)
    sum_up(story, console)
    if demo.facts is not None:
        demo.facts(story, console)
    save_picture(console, out / "console.svg", f"python examples/dynamics/{demo.name}.py")
    write_picture(story, out / f"{demo.name}.svg", demo.title)
    console.print(f"full log: {log}   report: {report}   picture: {out / demo.name}.svg", soft_wrap=True)
    return 0


def _parse(demo: Demo) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"{demo.name}.py", description=demo.title)
    parser.add_argument("--input", action="append", default=[], metavar="FILE", help="text or JSONL instead of the built-in")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument("--out", default=str(ROOT / "build" / demo.name), metavar="DIR", help="default: %(default)s")
    options = parser.parse_args()
    if options.steps < 6:
        parser.error(f"--steps: expected at least 6, got {options.steps}")
    return options


def sum_up(story: Story, console: Console) -> None:
    """What changed when, the layout over time, and the step time in between."""
    table = Table(title="what happened, and what a step took", title_justify="left")
    for column in ("steps", "began with", "layout", "step, median"):
        table.add_column(column)
    for stretch in story.stretches():
        seconds = f"{stretch.step_seconds:.3f} s"
        table.add_row(f"{stretch.first}-{stretch.last}", stretch.began_with or "start", stretch.layout, seconds)
    console.print(table)
    if not story.moves:
        console.print("no move was made; the reasons:", *(line["reason"] for line in story.rounds), sep="\n  ", highlight=False)
    for line in story.moves:
        before, after = line["measured_before_seconds"], line["measured_after_seconds"]
        if before and after:
            worth = f"{before:.3f} s to {after:.3f} s a step, {before / after:.2f} times as fast"
            console.print(f"the move after step {line['iteration']}: {worth}; it took {line['moving_seconds']:.2f} s")
    console.print(f"loss {story.losses[0]:.3f} to {story.losses[-1]:.3f} in {len(story.losses)} steps")
