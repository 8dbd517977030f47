"""`megatron-dyn simulate`: what would happen over a run: rounds over changing costs, a freeze schedule, changes of size.

Turns flags and files into the arguments of the pure parts (`rounds`, `freeze_rounds`, `resize`); `simulate_report` shows
what comes of it. It must not know how a split is found.
"""

import argparse
import os
from dataclasses import replace

from megatron_dyn.cli.document import read_text
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.freeze import parse_schedule, unit_layers
from megatron_dyn.cli.freeze_rounds import freeze_rounds
from megatron_dyn.cli.jobs import check_operations
from megatron_dyn.cli.output import countdown, warn, write_json
from megatron_dyn.cli.resize import Batch, Grid, dry_run, read_grids, read_points
from megatron_dyn.cli.rounds import StepSeconds, rehearse
from megatron_dyn.cli.simulate_arguments import MODES, add_simulate_arguments, check_used
from megatron_dyn.cli.simulate_report import Freezing, Outlook, Resizing, result_json, show
from megatron_dyn.cli.timing_file import TimingFile, read_timing
from megatron_dyn.cli.trace_file import read_trace, write_trace
from megatron_dyn.cli.workloads import DEFAULT_MICROBATCHES, LAYER, Trace, generate
from megatron_dyn.cli.yardsticks import yardsticks
from megatron_dyn.config import ConfigError, DecideConfig, DynConfig, MeasureConfig, RebalancePolicy
from megatron_dyn.plan.job import Job
from megatron_dyn.plan.pipeline.schedule import in_flight_by_chunk
from megatron_dyn.plan.problem import InfeasibleSplit
from megatron_dyn.plan.proposals import propose
from megatron_dyn.plan.workload import Workload
from megatron_dyn.records import Layout, LayoutError, even_layout

DESCRIPTION = (
    "Play a run through in virtual time. Give one of: a trace file, --kind, --freeze-schedule, --resize. Layers are equal "
    "unless a trace or --timing says what they cost."
)
_MIN_FREEZE_STEPS = 1_000
"""A run that ends with the last change of a schedule would leave nothing to plan for."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("simulate", help="play a run with changing costs through", description=DESCRIPTION)
    add_simulate_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Play through and show; returns 0. Raises ConfigError for bad input, InfeasibleSplit when nothing meets the limits."""
    given = [name for name in MODES if getattr(args, name) is not None]
    if len(given) != 1:
        said = " and ".join(MODES[name].title for name in given) or "none"
        raise InputError(f"simulate: expected one of {', '.join(mode.title for mode in MODES.values())}, got {said}")
    check_used(args, given[0])
    result: Outlook | Freezing | Resizing
    match given[0]:
        case "resize":
            result = _resize(args)
        case "freeze_schedule":
            result = _freeze(args)
        case _:
            result = _rounds(args)
    if args.json:
        write_json(result_json(result))
    else:
        show(result)
    return 0


def _rounds(args: argparse.Namespace) -> Outlook:
    trace = _trace(args)
    layout = _start(args, trace.num_layers, trace.layout)
    config = DynConfig(rebalance=_rebalance(args.rebalance), measure=_measure(args), decide=_decide(args))
    job = _job(args, trace.workload(0), layout)
    # The heaviest frame may have sizes beyond what a planner can add up, and comes when the run is half through.
    _job(args, trace.workload(max(range(len(trace.frames)), key=lambda frame: _bytes(trace, frame))), layout)
    check_operations(layout, trace.num_microbatches, _figures(args, layout, trace.num_microbatches))
    if args.write_trace is not None:
        write_trace(trace, "--write-trace", args.write_trace)
    step_seconds = StepSeconds(trace)
    with countdown(trace.num_steps, "playing the run") as advance:
        rehearsal = rehearse(trace, layout, config, step_seconds=step_seconds, advance=advance)
    used = tuple(dict.fromkeys(rehearsal.layouts))
    with countdown(len(trace.frames), "best layouts in hindsight") as advance:
        compared = yardsticks(trace, job, used, step_seconds=step_seconds, advance=advance)
    return Outlook(title=args.kind or args.trace, trace=trace, rehearsal=rehearsal, yardsticks=compared)


def _bytes(trace: Trace, frame: int) -> int:
    return sum(cost.state_bytes + trace.num_microbatches * cost.activation_bytes for cost in trace.frames[frame].layers)


def _trace(args: argparse.Namespace) -> Trace:
    if args.trace is not None:
        trace = read_trace(args.trace)
    else:
        timing = _timing(args, unsupported=("mtp", "speeds", "uncut", "other_seconds", "p2p_seconds"))
        layers = timing.layers if timing else (LAYER,) * _num_layers(args)
        num_stages = _num_stages(args, timing.layout if timing else None)
        trace = generate(args.kind, layers, num_stages=num_stages, num_steps=args.steps, seed=args.seed)
        if timing is not None:
            trace = replace(trace, embedding=timing.embedding, head=timing.head, layout=timing.layout)
            trace = replace(trace, num_microbatches=timing.num_microbatches or DEFAULT_MICROBATCHES)
    if args.micro_batches is not None:
        trace = replace(trace, num_microbatches=args.micro_batches)
    if args.steps is not None:
        trace = replace(trace, num_steps=args.steps, frames=tuple(f for f in trace.frames if f.step <= args.steps))
    return trace


def _freeze(args: argparse.Namespace) -> Freezing:
    timing = _timing(args, unsupported=("mtp", "speeds", "uncut", "p2p_seconds"))
    layers = timing.layers if timing else unit_layers(_num_layers(args))
    schedule = parse_schedule(args.freeze_schedule, num_layers=len(layers))
    layout = _start(args, len(layers), timing.layout if timing else None)
    num_microbatches = args.micro_batches or (timing.num_microbatches if timing else None) or DEFAULT_MICROBATCHES
    workload = Workload(layers=layers, num_microbatches=num_microbatches)
    if timing is not None:
        workload = timing.workload(
            num_stages=layout.num_stages, num_virtual=layout.num_virtual, num_microbatches=num_microbatches
        )
    _job(args, workload, layout)
    num_steps = args.steps or max(_MIN_FREEZE_STEPS, 2 * schedule.steps[-1])
    if late := [step for step in schedule.steps if step >= num_steps]:
        warn(f"changes at steps {late} come after the last step, {num_steps}")
    rounds = freeze_rounds(schedule, workload, layout, _decide(args), num_steps=num_steps, train_embedding=args.train_embedding)
    return Freezing(rounds=rounds, layout=layout, num_steps=num_steps)


def _resize(args: argparse.Namespace) -> Resizing:
    for flag, value in (("--sizes", args.sizes), ("--global-batch", args.global_batch)):
        if value is None:
            raise InputError(f"--resize: expected {flag} beside it, got none")
    timing = _timing(args, unsupported=("mtp", "speeds", "uncut", "p2p_seconds"))
    layers = timing.layers if timing else unit_layers(_num_layers(args))
    batch = Batch(global_batch=args.global_batch, micro_sizes=args.micro_batch_size)

    def layout_of(grid: Grid, num_microbatches: int) -> Layout:
        workload = Workload(layers=layers, num_microbatches=num_microbatches)
        if timing is not None:
            workload = timing.workload(num_stages=grid.pp, num_virtual=1, num_microbatches=num_microbatches)
        job = replace(_job(args, workload, _even(args, len(layers), grid.pp, f"size {grid.size}")), has_current=False)
        try:
            return propose(job, args.algorithm).layout
        except InfeasibleSplit as error:
            raise InfeasibleSplit(f"size {grid.size}: {error}") from error

    points, grids = read_points(_text(args.resize)), read_grids(_text(args.sizes))
    return Resizing(rows=dry_run(points, grids, batch, layout_of), batch=batch, gpus_per_node=args.gpus_per_node)


def _text(value: str) -> str:
    """What was written, or the content of the file that it names."""
    return read_text(value) if os.path.isfile(value) or value.endswith(".json") else value


def _timing(args: argparse.Namespace, *, unsupported: tuple[str, ...]) -> TimingFile | None:
    """The timing file, if any; raises InputError for fields that would be ignored."""
    if args.timing is None:
        return None
    timing = read_timing(args.timing)
    fields = {
        "mtp": timing.num_mtp > 0,
        "speeds": timing.speeds is not None,
        "uncut": bool(timing.uncut or timing.pinned_first or timing.pinned_last),
        "other_seconds": timing.other_seconds > 0,
        "p2p_seconds": timing.p2p_seconds != 0.0,
    }
    if ignored := [name for name in unsupported if fields[name]]:
        raise timing.document.error((ignored[0],), "is not supported by this simulation")
    if args.layers not in (None, len(timing.layers)):
        raise InputError(f"--layers {args.layers}: {args.timing} has {len(timing.layers)} layers")
    warn(*timing.notes)
    return timing


def _num_layers(args: argparse.Namespace) -> int:
    if args.layers is None:
        raise InputError("--layers: expected the number of layers, or --timing with what they cost, got neither")
    return int(args.layers)


def _num_stages(args: argparse.Namespace, current: Layout | None) -> int:
    if args.pp is None and current is None:
        raise InputError("--pp: expected the number of pipeline stages, got none")
    return int(args.pp) if args.pp is not None or current is None else current.num_stages


def _start(args: argparse.Namespace, num_layers: int, current: Layout | None) -> Layout:
    """The layout that the run starts at: --layout, else the file's, else an even split."""
    num_stages = _num_stages(args, current)
    if args.layout is not None:
        try:
            current = Layout.parse(args.layout, num_stages)
            current.check_num_layers(num_layers)
        except LayoutError as error:
            raise InputError(f"--layout: {error}") from error
    if current is None:
        return _even(args, num_layers, num_stages, "--pp")
    if current.num_stages != num_stages:
        raise InputError(f"--pp {num_stages}: the layout {current.text!r} in the file has {current.num_stages} stages")
    if any(chunk.num_mtp for chunk in current.chunks):
        raise InputError(f"layout {current.text!r}: MTP layers (m) are not supported by this simulation")
    return current


def _even(args: argparse.Namespace, num_layers: int, num_stages: int, where: str) -> Layout:
    if num_layers < num_stages and not args.allow_empty_stages:
        raise InputError(f"{where}: {num_stages} stages need a layer each, the model has {num_layers}")
    return even_layout(num_layers, num_stages, num_stages)


def _job(args: argparse.Namespace, workload: Workload, layout: Layout) -> Job:
    """The task of a planner, checked; raises InputError."""
    decide = _decide(args)
    if decide.stage_memory_bytes is not None and not any(cost.state_bytes or cost.activation_bytes for cost in workload.layers):
        raise InputError(
            f"--memory-gib {args.memory_gib:g}: the layers have no state_bytes or activation_bytes to hold against it"
        )
    if layout.num_virtual > 1:
        check_operations(layout, workload.num_microbatches, _figures(args, layout, workload.num_microbatches))
    try:
        in_flight_by_chunk(workload.num_microbatches, layout.num_stages, layout.num_virtual)
        job = Job(
            workload=workload,
            template=layout,
            min_layers=0 if decide.allow_empty_stages else 1,
            cap_bytes=decide.stage_memory_bytes,
        )
        # Built here once for its checks: later their errors would be taken for our own mistakes.
        _ = job.problem
    except ValueError as error:
        problem = str(error).removeprefix("SplitProblem: ").replace("MemoryBudget: ", "state_bytes and activation_bytes: ")
        raise InputError(problem) from error
    return job


def _figures(args: argparse.Namespace, layout: Layout, num_microbatches: int) -> str:
    """What a step is made of, by the flags that were given."""
    stages = f"layout of {len(layout.chunks)} chunks" if args.pp is None else f"--pp {args.pp}"
    flag = "num_microbatches" if args.micro_batches is None else "--micro-batches"
    return f"{stages}, {flag} {num_microbatches}"


def _rebalance(text: str) -> RebalancePolicy:
    try:
        return RebalancePolicy.parse(text)
    except ConfigError:
        raise
    except ValueError as error:
        # Python refuses to read a number of thousands of digits.
        raise InputError(f"--rebalance: expected steps of at most 9 digits, got {text[:60]!r}") from error


def _measure(args: argparse.Namespace) -> MeasureConfig:
    return MeasureConfig(
        interval_steps=args.profile_interval, window_samples=args.profile_window, warmup_steps=args.profile_warmup
    )


def _decide(args: argparse.Namespace) -> DecideConfig:
    return DecideConfig(
        min_gain=args.min_gain,
        horizon_steps=args.horizon_steps,
        cooldown_steps=args.cooldown_steps,
        allow_empty_stages=args.allow_empty_stages,
        algorithm=args.algorithm,
        stage_memory_bytes=None if args.memory_gib is None else int(args.memory_gib * 2**30),
    )
