"""How good and how fast every algorithm of the planner is, beside DeepSpeed's own functions; and how long a decision takes.

Run with `python -m benchmarks.planner`. `--deepspeed PYTHON` names an interpreter with a release of DeepSpeed; given twice, say
with 0.12.4 and the latest, both of its functions run. Gaps are to the exact answer of the same problem:
0 % is the fastest slowest stage there is. Times are CPU time of this one-threaded process.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median, quantiles
from time import process_time
from typing import Any

from benchmarks.machine import show
from benchmarks.planner_cases import FAMILIES, SIZES, TRACE_SHAPES, random_problems, sized_problem, trace, without_ends
from benchmarks.planner_time import show_times
from megatron_dyn.plan import InfeasibleSplit, Split, SplitProblem
from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.rivals.deepspeed import balanced, balanced_old

LIMIT_SECONDS = 10.0
"""An algorithm gets no size at which one call would take longer, going by the size before."""
_GROWTH = 8
"""How much longer twice the layers on twice the stages take at worst: layers squared times stages."""
_DEEPSPEED_ITERATIONS = {"random": 250_000, "sizes": 5_000_000}
"""Layers squared times stages up to which DeepSpeed's new function, loops in Python, is run: half a second, and ten."""
_WORKER = Path(__file__).with_name("deepspeed_worker.py")
_HOW_TO = (
    "DeepSpeed's own functions were not run: make an environment, `DS_BUILD_OPS=0 pip install --no-deps deepspeed` there, and "
    "pass its interpreter with --deepspeed"
)


@dataclass(slots=True, kw_only=True)
class Scores:
    """What one algorithm did on a set of problems."""

    gaps: list[float] = field(default_factory=list)
    """By answered problem: slowest stage over that of the exact answer, less 1."""
    seconds: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    num_asked: int = 0
    num_with_empty: int = 0
    """Answers that leave a stage without layers."""

    def add(self, problem: SplitProblem, best: Split, name: str) -> Split | None:
        """Ask algorithm `name`; returns its answer, None where it has none."""
        self.num_asked += 1
        start = process_time()
        try:
            split = ALGORITHMS[name].solve(problem)
        except InfeasibleSplit:
            return None
        self.seconds.append(process_time() - start)
        self.gaps.append(split.bottleneck_seconds / best.bottleneck_seconds - 1)
        self.num_with_empty += min(split.counts) == 0
        if split.rounds is not None:
            self.rounds.append(split.rounds)
        return split


def run(deepspeed: Sequence[str] = ()) -> None:
    """Measure and print everything; `deepspeed` are interpreters that have a release of it."""
    show_times()
    show_random("random problems", score(random_problems()))
    show_random("of the same without embedding and head", score(without_ends(random_problems())))
    show_families({family: score_traces(family) for family in FAMILIES})
    show_sizes(score_sizes(SIZES))
    for interpreter in deepspeed:
        show_deepspeed(interpreter)
    if not deepspeed:
        print(_HOW_TO)


def score(problems: Iterable[SplitProblem]) -> dict[str, Scores]:
    """All algorithms on problems that stand by themselves."""
    scores = {name: Scores() for name in ALGORITHMS}
    for problem in problems:
        best = ALGORITHMS["exact"].solve(problem)
        for name, found in scores.items():
            found.add(problem, best, name)
    return scores


def score_traces(family: str, shapes: Sequence[tuple[int, int]] = TRACE_SHAPES) -> dict[str, Scores]:
    """All algorithms on jobs over time: each starts at every step from what it made of the step before."""
    scores = {name: Scores() for name in ALGORITHMS}
    for num_layers, num_stages in shapes:
        current: dict[str, tuple[int, ...] | None] = dict.fromkeys(ALGORITHMS)
        for problem in trace(family, num_layers, num_stages):
            best = ALGORITHMS["exact"].solve(problem)
            for name, found in scores.items():
                split = found.add(replace(problem, current=current[name]), best, name)
                current[name] = current[name] if split is None else split.counts
    return scores


def score_sizes(sizes: Sequence[tuple[int, int]], *, limit_seconds: float = LIMIT_SECONDS) -> dict[str, list[Scores | None]]:
    """By algorithm and size; None where a call would take longer than the limit."""
    scores: dict[str, list[Scores | None]] = {name: [] for name in ALGORITHMS}
    for num_layers, num_stages in sizes:
        problem = sized_problem(num_layers, num_stages)
        best = ALGORITHMS["exact"].solve(problem)
        for name, rows in scores.items():
            if rows and (rows[-1] is None or max(rows[-1].seconds, default=0.0) * _GROWTH > limit_seconds):
                rows.append(None)
                continue
            rows.append(Scores())
            rows[-1].add(problem, best, name)
    return scores


def show_random(title: str, scores: dict[str, Scores]) -> None:
    """One row for each algorithm; `title` follows the number of problems."""
    rows = []
    for name, found in scores.items():
        gaps = found.gaps
        cells = [_percent(median(gaps)), _percent(quantiles(gaps, n=10)[-1]), _percent(max(gaps))]
        reached = sum(gap < 1e-9 for gap in gaps) / len(gaps)
        rows.append(
            [
                name,
                f"{len(gaps):,}",
                *cells,
                f"{reached:.0%}",
                str(found.num_with_empty),
                _milliseconds(median(found.seconds)),
                f"{median(found.rounds):g}, {max(found.rounds)}" if found.rounds else "",
            ]
        )
    columns = [
        "algorithm",
        "answered",
        "gap: median",
        "9 in 10 below",
        "worst",
        "best found",
        "with an empty stage",
        "ms",
        "rounds",
    ]
    show(f"{next(iter(scores.values())).num_asked:,} {title}", columns, rows)


def show_families(scores: dict[str, dict[str, Scores]]) -> None:
    """One row for each algorithm, a column for each family: mean and worst gap."""
    rows = []
    for name in ALGORITHMS:
        found = [of_family[name].gaps for of_family in scores.values()]
        rows.append([name, *(f"{_percent(fmean(gaps))}, {_percent(max(gaps))}" if gaps else "refuses" for gaps in found)])
    show("traces of six families: mean and worst gap", ["algorithm", *scores], rows)


def show_sizes(scores: dict[str, list[Scores | None]]) -> None:
    """One row for each algorithm, a column for each size: gap and time."""
    rows = [[name, *(_size_cell(found) for found in of_sizes)] for name, of_sizes in scores.items()]
    columns = ["algorithm", *(f"{num_layers:,} on {num_stages:,}" for num_layers, num_stages in SIZES)]
    show(f"sizes: gap and milliseconds ('-': a call would take over {LIMIT_SECONDS:g} s)", columns, rows)


def _size_cell(found: Scores | None) -> str:
    if found is None:
        return "-"
    return f"{_percent(found.gaps[0])}, {_milliseconds(found.seconds[0])}" if found.gaps else "refuses"


def show_deepspeed(interpreter: str) -> None:
    """The function of one release beside ours on the random problems and the sizes, as far as it gets in reasonable time."""
    probe = ask_deepspeed(interpreter, [])
    # The old function's callers gave it milliseconds.
    scale, ours = (1e3, balanced_old) if probe["is_old"] else (1.0, balanced)
    problems = [
        problem for problem in random_problems() if probe["is_old"] or _iterations(problem) <= _DEEPSPEED_ITERATIONS["random"]
    ]
    sized = [sized_problem(*size) for size in SIZES]
    sized = [problem for problem in sized if probe["is_old"] or _iterations(problem) <= _DEEPSPEED_ITERATIONS["sizes"]]
    cases = [([scale * cost for cost in problem.layer_seconds], problem.num_stages) for problem in (*problems, *sized)]
    found = ask_deepspeed(interpreter, cases)
    rows, num_different = [], 0
    for (weights, parts), (boundaries, seconds) in zip(cases, found["answers"], strict=True):
        start = process_time()
        counts = ours(weights, parts)
        own_seconds = process_time() - start
        num_different += list(accumulate(counts, initial=0)) != boundaries
        rows.append([f"{len(weights):,} on {parts:,}", _milliseconds(seconds), _milliseconds(own_seconds)])
    kind = "old" if probe["is_old"] else "new"
    title = (
        f"DeepSpeed {found['version']}, partition_balanced ({kind}): {num_different} of {len(cases):,} answers "
        "differ from ours; times by size"
    )
    show(title, ["layers on stages", "theirs, ms", "ours, ms"], rows[len(problems) :])


def ask_deepspeed(interpreter: str, cases: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """What the worker answers; raises CalledProcessError, with its output shown, when it fails."""
    done = subprocess.run(
        [interpreter, str(_WORKER)], input=json.dumps(list(cases)), stdout=subprocess.PIPE, text=True, check=True
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _iterations(problem: SplitProblem) -> int:
    return len(problem.layer_seconds) ** 2 * problem.num_stages


def _percent(gap: float) -> str:
    return f"{100 * gap:.2f} %"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds < 0.1 else f"{1e3 * seconds:,.0f}"


def main(arguments: Sequence[str]) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planner", description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", metavar="PYTHON", action="append", default=[], help="an interpreter that has DeepSpeed")
    run(parser.parse_args(arguments).deepspeed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
