"""The job that a command plans for: a timing file, and the flags that say on how many stages of what size it runs.

Used by every command that plans. It must not know how splits are found or shown.
"""

import argparse
from dataclasses import dataclass

import shtab

from megatron_dyn.cli.arguments import (
    MAX_CHUNKS,
    MAX_MICROBATCHES,
    MAX_STAGES,
    positive_int,
    positive_number,
    up_to,
)
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.timing_file import TimingFile
from megatron_dyn.cli.verdicts import with_speeds
from megatron_dyn.plan.job import Job
from megatron_dyn.plan.pipeline.schedule import in_flight_by_chunk
from megatron_dyn.plan.problem import InfeasibleSplit
from megatron_dyn.plan.proposals import MAX_OPERATIONS
from megatron_dyn.records import Layout, LayoutError, even_layout

DEFAULT_MICROBATCHES_PER_STAGE = 8
"""With as many the bubble of a balanced pipeline is about 11 %; users who know their number say it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The flags of `add_job_arguments`."""

    pp: int
    vpp: int | None = None
    num_microbatches: int | None = None
    group_size: int | None = None
    memory_gib: float | None = None
    layout: str | None = None
    allow_empty_stages: bool = False


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """Add FILE and the flags of a Shape."""
    file = parser.add_argument("file", metavar="FILE", help="timing file: JSON, CSV, or rounds.jsonl of a run (or its folder)")
    file.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument("--pp", type=up_to(MAX_STAGES), required=True, metavar="P", help="pipeline stages")
    parser.add_argument(
        "--vpp",
        type=up_to(MAX_CHUNKS),
        metavar="V",
        help="virtual stages (chunks) per stage; default: those of the current layout, else 1",
    )
    parser.add_argument(
        "--micro-batches",
        type=up_to(MAX_MICROBATCHES),
        metavar="M",
        help=f"micro-batches of a step; default: the file's, else {DEFAULT_MICROBATCHES_PER_STAGE} per stage",
    )
    parser.add_argument(
        "--group-size",
        type=positive_int,
        metavar="N",
        help="with virtual stages: Megatron's --microbatch-group-size-per-virtual-pipeline-stage; default: P",
    )
    parser.add_argument("--memory-gib", type=positive_number, metavar="X", help="the most memory that a stage may need")
    parser.add_argument(
        "--layout", metavar="CURRENT", help="the layout in force, in Megatron's syntax; default: the file's, if any"
    )
    parser.add_argument("--allow-empty-stages", action="store_true", help="let a chunk hold no decoder layer")


def shape_of(args: argparse.Namespace) -> Shape:
    """What the flags of `add_job_arguments` say."""
    return Shape(
        pp=args.pp,
        vpp=args.vpp,
        num_microbatches=args.micro_batches,
        group_size=args.group_size,
        memory_gib=args.memory_gib,
        layout=args.layout,
        allow_empty_stages=args.allow_empty_stages,
    )


def job_of(timing: TimingFile, shape: Shape) -> tuple[Job, tuple[str, ...]]:
    """The job, and notes for the user; raises InputError naming the flag or field that does not fit.

    Raises InfeasibleSplit when a layout that has to be made would leave stages without a layer.
    """
    current = _current(timing, shape)
    timing, advice = with_speeds(timing, shape.pp)
    notes = [*timing.notes, *advice]
    num_virtual = shape.vpp or 1
    if current is not None and current.num_stages == shape.pp and shape.vpp in (None, current.num_virtual):
        template, has_current, num_virtual = current, True, current.num_virtual
    else:
        _check_fresh(timing, shape, num_virtual)
        template = even_layout(len(timing.layers), shape.pp * num_virtual, shape.pp, num_mtp=timing.num_mtp)
        has_current = False
        if current is not None:
            notes.append(
                f"the current layout has {current.num_stages} stages of {current.num_virtual} chunks, planned for "
                f"{shape.pp} of {num_virtual}: nothing to move from (num_stages in the file says how many its layout has)"
            )
    num_microbatches = shape.num_microbatches or timing.num_microbatches
    if num_microbatches is None:
        per_stage = min(DEFAULT_MICROBATCHES_PER_STAGE, MAX_MICROBATCHES // shape.pp)
        num_microbatches = per_stage * shape.pp
        notes.append(f"{num_microbatches} micro-batches assumed, {per_stage} per stage (--micro-batches)")
    _check_schedule(num_microbatches, shape, num_virtual)
    workload = timing.workload(num_stages=shape.pp, num_virtual=num_virtual, num_microbatches=num_microbatches)
    cap_bytes = _cap_bytes(timing, shape)
    try:
        job = Job(
            workload=workload,
            template=template,
            has_current=has_current,
            min_layers=0 if shape.allow_empty_stages else 1,
            cap_bytes=cap_bytes,
            group_size=shape.group_size,
            layer_parameters=timing.layer_parameters,
            pinned_first=timing.pinned_first,
            pinned_last=timing.pinned_last,
        )
        # Built here once for its checks: later their errors would be taken for our own mistakes.
        _ = job.problem
    except ValueError as error:
        raise InputError(f"{timing.document.name}: {_in_fields(timing, error)}") from error
    return job, tuple(notes)


def check_operations(layout: Layout, num_microbatches: int, named: str) -> None:
    """Raise InputError when a step is too large to be simulated forward by forward; `named` says whose figures these are."""
    num_operations = 2 * num_microbatches * len(layout.chunks)
    if num_operations > MAX_OPERATIONS:
        raise InputError(
            f"{named}: expected at most {MAX_OPERATIONS} forwards and backwards in a step (2 x micro-batches x chunks), got "
            f"2 x {num_microbatches} x {len(layout.chunks)} = {num_operations}"
        )


def figures(shape: Shape, num_virtual: int, num_microbatches: int) -> str:
    """The figures of a schedule by the flags that were given; what the file or a default says is no flag."""
    virtual = (
        f"--vpp {shape.vpp}" if shape.vpp is not None else f"{num_virtual} virtual stages in the layout" * (num_virtual > 1)
    )
    flag = "num_microbatches" if shape.num_microbatches is None else "--micro-batches"
    return ", ".join(part for part in (f"--pp {shape.pp}", virtual, f"{flag} {num_microbatches}") if part)


def _in_fields(timing: TimingFile, error: ValueError) -> str:
    """A refusal of the planner in the words of the file."""
    problem = str(error).removeprefix("SplitProblem: ").replace("MemoryBudget: ", "state_bytes and activation_bytes: ")
    implied = "pinned_last" in problem and timing.num_mtp and not timing.pinned_last
    return f"{problem} (mtp keeps one layer on the last stage)" if implied else problem


def _check_fresh(timing: TimingFile, shape: Shape, num_virtual: int) -> None:
    """Refuse what a new layout cannot be, before a list of all its chunks is made."""
    if shape.pp * num_virtual > MAX_CHUNKS:
        problem = f"expected at most {MAX_CHUNKS} chunks, got {shape.pp} x {num_virtual} = {shape.pp * num_virtual}"
        raise InputError(f"--pp {shape.pp}, --vpp {num_virtual}: {problem}")
    if len(timing.layers) < shape.pp and not shape.allow_empty_stages:
        raise InfeasibleSplit(
            f"--pp {shape.pp}: expected at least {shape.pp} layers, one for each stage, got {len(timing.layers)} in "
            f"{timing.document.name} (--allow-empty-stages lets stages hold none)"
        )


def _current(timing: TimingFile, shape: Shape) -> Layout | None:
    if shape.layout is None:
        return timing.layout
    try:
        current = Layout.parse(shape.layout, shape.pp)
        current.check_num_layers(len(timing.layers))
    except LayoutError as error:
        raise InputError(f"--layout: {error}") from error
    if shape.vpp not in (None, current.num_virtual):
        raise InputError(f"--layout {shape.layout!r}: expected {shape.pp} x {shape.vpp} chunks, got {len(current.chunks)}")
    num_mtp = sum(chunk.num_mtp for chunk in current.chunks)
    if num_mtp != timing.num_mtp:
        raise InputError(f"--layout {shape.layout!r}: expected the file's {timing.num_mtp} MTP layers (m), got {num_mtp}")
    return current


def _cap_bytes(timing: TimingFile, shape: Shape) -> int | None:
    if shape.memory_gib is None:
        return None
    if not timing.knows_bytes:
        problem = "expected state_bytes or activation_bytes in the file to hold against the cap, got none"
        raise InputError(f"--memory-gib {shape.memory_gib:g}: {problem} in {timing.document.name}")
    return int(shape.memory_gib * 2**30)


def _check_schedule(num_microbatches: int, shape: Shape, num_virtual: int) -> None:
    try:
        in_flight_by_chunk(num_microbatches, shape.pp, num_virtual, shape.group_size)
    except ValueError as error:
        raise InputError(f"{figures(shape, num_virtual, num_microbatches)}: {error}") from error
