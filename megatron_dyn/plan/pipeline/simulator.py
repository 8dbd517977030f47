"""A step simulated: when every rank computes what, how long the step takes, where it waits, what it holds at most.

Puts the times of a layout's chunks (`ChunkTimes`) to the programs of `program`. The exact form: transfers hold their
sender up, as they do in Megatron; `predict` has a quicker one without transfers. It must not know where the
times come from.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_dyn.plan.pipeline.predict import FloatArray, bubble_fraction
from megatron_dyn.plan.pipeline.program import Do, Instruction, number_of, programs
from megatron_dyn.plan.pipeline.schedule import Phase, Schedule
from megatron_dyn.plan.workload import ChunkTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One operation of a simulated step. Seconds since its start."""

    pp_rank: int
    chunk: int
    """In layer order, over all stages."""
    phase: Phase
    microbatch: int
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRun:
    """A simulated step."""

    spans: tuple[tuple[Span, ...], ...]
    """By pp_rank: its operations, in order."""
    step_seconds: float
    """The whole step, optimizer included."""
    pipeline_seconds: float
    """Until the last rank has done its last operation."""
    busy_seconds: tuple[float, ...]
    """By pp_rank: time spent computing, without the optimizer."""
    bubble_fraction: float
    """Share of all ranks' time in the pipeline that is spent waiting."""
    in_flight: tuple[int, ...]
    """By pp_rank: the most activations kept for their backward at once, one for each micro-batch and chunk."""


def simulate_pipeline(
    times: ChunkTimes,
    num_microbatches: int,
    *,
    group_size: int | None = None,
    overlap_p2p: bool | None = None,
    forward_only: bool = False,
) -> PipelineRun:
    """One step of Megatron's 1F1B, interleaved where there are several chunks to a stage.

    A transfer starts when both of its sides have come to it, takes the boundary's `p2p_seconds`, and holds up whoever
    waits for it; transfers do not slow each other down. That is how gloo works, and NCCL for all but small messages. A
    rank waits where Megatron 0.18 and later does. Once all ranks are done they meet in the gradient norm; then the slowest
    optimizer counts. `group_size` is Megatron's group of micro-batches per virtual stage (None: the number of stages).
    `overlap_p2p` None means as Megatron sets it: on with virtual stages, off without. Overlap in warm-up and flush
    (`--overlap-p2p-communication-warmup-flush`) and gradients reduced while the pipeline runs are not modelled.
    Raises ValueError for a shape that Megatron refuses and for times that do not fit together or are negative.
    """
    _check_times(times)
    schedule = Schedule(
        num_stages=times.num_stages,
        num_microbatches=num_microbatches,
        num_virtual=len(times.forward_seconds) // times.num_stages,
        group_size=group_size,
        forward_only=forward_only,
    )
    to_run = programs(schedule, schedule.num_virtual > 1 if overlap_p2p is None else overlap_p2p)
    compute, transfer = _seconds_by_number(times, num_microbatches)
    starts = _run(to_run, compute, transfer, 0.0, max)
    spans = tuple(_spans(schedule, times, pp_rank, starts) for pp_rank in range(times.num_stages))
    pipeline_seconds = max(of_rank[-1].end_seconds for of_rank in spans)
    busy = tuple(_busy_seconds(schedule, times, pp_rank) for pp_rank in range(times.num_stages))
    return PipelineRun(
        spans=spans,
        step_seconds=pipeline_seconds + (0.0 if forward_only else max(times.optimizer_seconds)),
        pipeline_seconds=pipeline_seconds,
        busy_seconds=busy,
        bubble_fraction=bubble_fraction(busy, pipeline_seconds),
        in_flight=_peaks(spans, [1] * len(times.forward_seconds)),
    )


def peak_activation_bytes(run: PipelineRun, activation_bytes_by_chunk: Sequence[int]) -> tuple[int, ...]:
    """By pp_rank: the most bytes of activations that it keeps at once; 0 for a forward-only run, which keeps none.

    `activation_bytes_by_chunk` is what one micro-batch keeps in each chunk, in layer order. Raises ValueError when it
    does not name as many chunks as ran.
    """
    num_chunks = 1 + max(span.chunk for of_rank in run.spans for span in of_rank)
    if len(activation_bytes_by_chunk) != num_chunks:
        raise ValueError(f"peak_activation_bytes: expected {num_chunks} chunks, got {len(activation_bytes_by_chunk)}")
    return _peaks(run.spans, activation_bytes_by_chunk)


def pipeline_seconds_of(
    forward: FloatArray,
    backward: FloatArray,
    p2p_seconds: Sequence[float],
    num_microbatches: int,
    *,
    num_stages: int,
    group_size: int | None = None,
) -> FloatArray:
    """[batch]: `simulate_pipeline(...).pipeline_seconds` for many layouts of one shape at once, to rounding.

    `forward` and `backward`, [batch, chunks], are seconds of one micro-batch; `p2p_seconds` is the same for all. All layouts
    share one order of events, since no choice depends on time, so sixty take little longer than one.
    """
    num_chunks = forward.shape[1]
    schedule = Schedule(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_virtual=num_chunks // num_stages,
        group_size=group_size,
    )
    to_run = programs(schedule, schedule.num_virtual > 1)
    columns = [np.ascontiguousarray(table[:, chunk]) for table in (forward, backward) for chunk in range(num_chunks)]
    compute = [column for column in columns for _ in range(num_microbatches)]
    transfer = [seconds for seconds in (0.0, *p2p_seconds, *p2p_seconds, 0.0) for _ in range(num_microbatches)]
    starts = _run(to_run, compute, transfer, np.zeros(len(forward)), np.maximum)
    last = [next(number for do, number in reversed(program) if do is Do.COMPUTE) for program in to_run]
    ends: FloatArray = np.stack([starts[number] + compute[number] for number in last]).max(axis=0)
    return ends


def _run[Seconds: (float, FloatArray)](
    to_run: Sequence[Sequence[Instruction]],
    compute: Sequence[Seconds],
    transfer: Sequence[float],
    zero: Seconds,
    latest: Callable[[Seconds, Seconds], Seconds],
) -> list[Seconds]:
    """Run all programs; returns when each operation starts, by its number (`program.number_of`).

    `compute` and `transfer` are by number: what an operation takes, and its input to travel. Seconds are numbers, or
    arrays over many layouts, whose larger ones `latest` takes.
    No choice depends on time, so ranks run one after another, each until it waits for a message that its other side has
    not come to yet. Whoever posts the second side wakes it.
    """
    starts = [zero] * len(compute)
    posted: list[Seconds | None] = [None] * len(compute)
    arrivals: list[Seconds | None] = [None] * len(compute)
    waiting: dict[int, int] = {}
    clocks, positions = [zero] * len(to_run), [0] * len(to_run)
    ready = list(range(len(to_run)))
    while ready:
        pp_rank = ready.pop()
        program, now = to_run[pp_rank], clocks[pp_rank]
        for position in range(positions[pp_rank], len(program)):
            do, number = program[position]
            if do is Do.COMPUTE:
                starts[number] = now
                now = now + compute[number]
            elif do is Do.WAIT:
                arrival = arrivals[number]
                if arrival is None:
                    clocks[pp_rank], positions[pp_rank], waiting[number] = now, position, pp_rank
                    break
                now = latest(now, arrival)
            elif (other := posted[number]) is None:
                posted[number] = now
            else:
                arrivals[number] = latest(other, now) + transfer[number]
                if number in waiting:
                    ready.append(waiting.pop(number))
    assert not waiting, f"ranks {sorted(waiting.values())} wait for messages that nobody sends or receives"
    return starts


def _seconds_by_number(times: ChunkTimes, num_microbatches: int) -> tuple[list[float], list[float]]:
    """What each operation takes to compute, and its input to travel. Those at the ends of the model have none."""
    compute = [seconds for seconds in (*times.forward_seconds, *times.backward_seconds) for _ in range(num_microbatches)]
    transfer = [seconds for seconds in (0.0, *times.p2p_seconds, *times.p2p_seconds, 0.0) for _ in range(num_microbatches)]
    return compute, transfer


def _spans(schedule: Schedule, times: ChunkTimes, pp_rank: int, starts: Sequence[float]) -> tuple[Span, ...]:
    seconds = {Phase.FORWARD: times.forward_seconds, Phase.BACKWARD: times.backward_seconds}
    spans = []
    for op in schedule.operations(pp_rank):
        start = starts[number_of(schedule, op)]
        spans.append(
            Span(
                pp_rank=pp_rank,
                chunk=op.chunk,
                phase=op.phase,
                microbatch=op.microbatch,
                start_seconds=start,
                end_seconds=start + seconds[op.phase][op.chunk],
            )
        )
    return tuple(spans)


def _busy_seconds(schedule: Schedule, times: ChunkTimes, pp_rank: int) -> float:
    own = slice(pp_rank, None, times.num_stages)
    backward = () if schedule.forward_only else times.backward_seconds[own]
    return schedule.num_microbatches * math.fsum((*times.forward_seconds[own], *backward))


def _peaks(spans: Sequence[Sequence[Span]], by_chunk: Sequence[int]) -> tuple[int, ...]:
    """By pp_rank: the largest sum of `by_chunk` over forwards begun whose backward has not ended."""
    peaks = []
    for of_rank in spans:
        held = peak = 0
        has_backward = any(span.phase is Phase.BACKWARD for span in of_rank)
        for span in of_rank if has_backward else ():
            held += by_chunk[span.chunk] if span.phase is Phase.FORWARD else -by_chunk[span.chunk]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


def _check_times(times: ChunkTimes) -> None:
    num_chunks, num_stages = len(times.forward_seconds), times.num_stages
    lengths = (len(times.backward_seconds), len(times.p2p_seconds), len(times.optimizer_seconds))
    if num_stages < 1 or not num_chunks or num_chunks % num_stages or lengths != (num_chunks, num_chunks - 1, num_stages):
        raise ValueError(
            f"simulate_pipeline: expected the same number of chunks on each of {num_stages} stages, one p2p time less and "
            f"{num_stages} optimizer times, got {num_chunks} forward, {lengths[0]} backward, {lengths[1]} p2p, {lengths[2]} "
            "optimizer"
        )
    for name in ("forward_seconds", "backward_seconds", "p2p_seconds", "optimizer_seconds"):
        for position, seconds in enumerate(getattr(times, name)):
            if not (math.isfinite(seconds) and seconds >= 0.0):
                raise ValueError(f"simulate_pipeline: {name}[{position}]: expected a time of at least 0, got {seconds}")
