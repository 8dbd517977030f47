"""`megatron-dyn plan`: the best layout for the costs in a timing file, what every other algorithm would make of them, why.

Finds with `plan.propose`, shows with `plan_report`. It must not know the form of the file.
"""

import argparse

import shtab

from megatron_dyn.cli.arguments import fraction
from megatron_dyn.cli.chrome_trace import write_trace
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.jobs import add_job_arguments, check_operations, figures, job_of, shape_of
from megatron_dyn.cli.output import progress, write_json
from megatron_dyn.cli.picture import PICTURE_SUFFIXES, Panel, write_picture
from megatron_dyn.cli.plan_report import PlanAnswer, answer_json, show_answer
from megatron_dyn.cli.sizes import sizes_of
from megatron_dyn.cli.timing_file import read_timing
from megatron_dyn.config import DecideConfig, ShrinkPolicy
from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.job import Job
from megatron_dyn.plan.pipeline.simulator import PipelineRun, simulate_pipeline
from megatron_dyn.plan.problem import InfeasibleSplit
from megatron_dyn.plan.proposals import MAX_OPERATIONS, Refused, compare, forecast
from megatron_dyn.records import Layout

DESCRIPTION = "Find the layout under which a step is fastest, and compare all algorithms on the same costs."


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("plan", help="find the best layout for a timing file", description=DESCRIPTION)
    add_job_arguments(parser)
    parser.add_argument(
        "--algorithm",
        choices=list(ALGORITHMS),
        default="exact",
        metavar="A",
        help=f"one of {', '.join(ALGORITHMS)}; default: exact",
    )
    min_gain = DecideConfig().min_gain
    parser.add_argument(
        "--min-gain",
        type=fraction,
        default=min_gain,
        metavar="F",
        help=f"fraction of the step that a move from the current layout must save to be advised; default: {min_gain:g}",
    )
    parser.add_argument(
        "--shrink-policy",
        default="off",
        metavar="P",
        help="name the size that throughput:TOL (losing at most the fraction TOL of the tokens per second), efficiency (most "
        "tokens per second and GPU) or memory (as few stages as fit) would take; default: off",
    )
    parser.add_argument("--json", action="store_true", help="write JSON and nothing else to stdout")
    suffixes = ", ".join(PICTURE_SUFFIXES)
    for flag, what in (
        ("--picture", f"a picture of the step, by suffix: {suffixes}"),
        ("--trace", "the step for Perfetto or chrome://tracing"),
    ):
        action = parser.add_argument(flag, metavar="OUT", help=f"write {what}")
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Plan and show; returns 0. Raises ConfigError for bad input, InfeasibleSplit when nothing meets the constraints."""
    if args.picture is not None and not args.picture.endswith(PICTURE_SUFFIXES):
        raise InputError(f"--picture: expected a path that ends in {' or '.join(PICTURE_SUFFIXES)}, got {args.picture!r}")
    answer = plan(args)
    if args.picture is not None:
        write_picture(args.picture, _panels(answer))
    if args.trace is not None:
        write_trace(args.trace, _run_of(answer, "--trace"), answer.title)
    if args.json:
        write_json(answer_json(answer))
    else:
        show_answer(answer)
    return 0


def plan(args: argparse.Namespace) -> PlanAnswer:
    """The answer to the flags; raises like `run`."""
    policy = ShrinkPolicy.parse(args.shrink_policy)
    timing, shape = read_timing(args.file), shape_of(args)
    job, notes = job_of(timing, shape)
    if job.template.num_virtual > 1:
        num_microbatches = job.workload.num_microbatches
        check_operations(job.template, num_microbatches, figures(shape, job.template.num_virtual, num_microbatches))
    with progress(len(ALGORITHMS), "comparing algorithms") as on_progress:
        compared = compare(job, on_progress=on_progress)
    chosen = next(entry for entry in compared if entry.algorithm == args.algorithm)
    if isinstance(chosen, Refused):
        raise InfeasibleSplit(f"{args.file}: {chosen.algorithm}: {chosen.reason}")
    return PlanAnswer(
        job=job,
        chosen=chosen,
        compared=compared,
        current=forecast(job, job.template) if job.has_current else None,
        min_gain=args.min_gain,
        measured_step_seconds=timing.measured_step_seconds if timing.layout == job.template else None,
        knows_bytes=timing.knows_bytes,
        notes=notes,
        sizes=sizes_of(job, policy, chosen.forecast.stage_bytes if timing.knows_bytes else None),
        forward_only_seconds=None if chosen.forecast.run is None else _forward_only_seconds(job, chosen.layout),
    )


def _forward_only_seconds(job: Job, layout: Layout) -> float:
    times, num_microbatches = job.workload.chunk_times(layout), job.workload.num_microbatches
    return simulate_pipeline(times, num_microbatches, group_size=job.group_size, forward_only=True).step_seconds


def _panels(answer: PlanAnswer) -> list[Panel]:
    """The step of the answer, below that of the layout in force where it is another."""
    panels = [(_run_of(answer, "--picture"), answer.title)]
    now = answer.current
    if now is None or now.run is None or now.layout == answer.chosen.layout:
        return panels
    title = f"now {now.layout.text}: step {now.step_seconds:.4g} s, bubble {now.bubble_fraction:.1%}"
    return [(now.run, title), *panels]


def _run_of(answer: PlanAnswer, flag: str) -> PipelineRun:
    run = answer.chosen.forecast.run
    if run is None:
        raise InputError(f"{flag}: expected a step of at most {MAX_OPERATIONS} forwards and backwards, got more")
    return run
