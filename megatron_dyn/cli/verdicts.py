"""Slow ranks and heavy layers told apart, as far as a timing file allows, and the costs put right for it.

Used by `jobs`; the judging is done by `plan.speeds`. It must not know flags.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_dyn.cli.timing_file import TimingFile
from megatron_dyn.plan.speeds import Observation, SpeedEstimate, Verdict, estimate_speeds, verdicts
from megatron_dyn.plan.workload import at_speed_one
from megatron_dyn.records import Layout


def with_speeds(timing: TimingFile, num_stages: int) -> tuple[TimingFile, tuple[str, ...]]:
    """The file with its costs as ranks of speed 1 would have them, and the speeds of the ranks found out; and notes.

    Only for files that say under which layout they were measured, and name no speeds themselves; all others are returned
    as they are. A plan for another number of stages than the layout's has other ranks: it gets the costs, and no speeds.
    Raises InputError for observations that cannot be.
    """
    layout = timing.layout
    if layout is None or timing.speeds is not None:
        return timing, ()
    stage_seconds = _stage_seconds(timing, layout)
    kinds = {layer: kind for layer, kind in enumerate(timing.kinds) if kind}
    try:
        estimate = estimate_speeds((*timing.observations, *_measured_layers(timing, layout)), layout.num_stages, alike=kinds)
    except ValueError as error:
        raise timing.document.error(("observations",), str(error)) from error
    same = layout.num_stages == num_stages
    notes = list(_advice(verdicts(stage_seconds, estimate), stage_seconds, estimate, same=same))
    if (speeds := estimate.usable) is None:
        return timing, tuple(notes)
    notes.append(
        f"speeds of ranks are carried over: {num_stages} stages as in the file"
        if same
        else f"speeds of ranks are not carried over to another number of stages ({layout.num_stages} in the file, "
        f"{num_stages} planned): the layers cost what they would on ranks of equal speed"
    )
    timing = _with_costs_at_speed_one(timing, layout, speeds)
    return (timing if same else replace(timing, speeds=None)), tuple(notes)


def _stage_seconds(timing: TimingFile, layout: Layout) -> tuple[float, ...]:
    """By pp_rank of the layout that was measured: forward and backward of one micro-batch."""
    # The time of sends does not count here, and a list of it is as long as the job that is planned for needs.
    work = replace(timing, p2p_seconds=0.0).workload(
        num_stages=layout.num_stages, num_virtual=layout.num_virtual, num_microbatches=1
    )
    return work.chunk_times(layout).stage_seconds


def _measured_layers(timing: TimingFile, layout: Layout) -> Iterator[Observation]:
    """What the file says by itself: each layer took its seconds on the rank that the layout has it on."""
    for layer, pp_rank in enumerate(layout.stage_of()):
        if timing.layers[layer].seconds > 0.0:
            yield Observation(layer=layer, pp_rank=pp_rank, seconds=timing.layers[layer].seconds)


def _advice(found: Sequence[Verdict], stage_seconds: Sequence[float], estimate: SpeedEstimate, *, same: bool) -> Iterator[str]:
    """A line for each stage that stands out; `same` says that the plan has these stages, so that layers can be moved."""
    for pp_rank, verdict in enumerate(found):
        stage = f"stage {pp_rank}{'' if same else ' of the layout in the file'} ({stage_seconds[pp_rank]:.4g} s a micro-batch)"
        if verdict is Verdict.SLOW_DEVICE:
            speed = f"{estimate.speeds[pp_rank]:.2f} times the speed of the typical rank it was compared with"
            yield f"{stage}: {verdict.value}, {speed}:{' it is given fewer layers;' * same} have a look at the machine"
        elif verdict is Verdict.HEAVY_STAGE and same:
            yield f"{stage}: {verdict.value}: its layers weigh more, the device is not slow; move layers away"
        elif verdict is Verdict.UNTOLD:
            yield (
                f"{stage}: slow device or heavy stage, {verdict.value}: none of its layers was timed on another stage or is of "
                "one kind with layers there; planned as a heavy stage"
            )


def _with_costs_at_speed_one(timing: TimingFile, layout: Layout, speeds: tuple[float, ...]) -> TimingFile:
    holders = {
        what: next((index % layout.num_stages for index, chunk in enumerate(layout.chunks) if getattr(chunk, what)), 0)
        for what in ("embedding", "num_mtp", "loss")
    }
    return replace(
        timing,
        layers=tuple(
            at_speed_one(cost, speeds[pp_rank]) for cost, pp_rank in zip(timing.layers, layout.stage_of(), strict=True)
        ),
        embedding=at_speed_one(timing.embedding, speeds[holders["embedding"]]),
        head=at_speed_one(timing.head, speeds[holders["loss"]]),
        mtp=at_speed_one(timing.mtp, speeds[holders["num_mtp"]]),
        speeds=speeds,
    )
