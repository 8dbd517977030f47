"""An answer of `plan`, as tables for people and as JSON for machines. It must not know how the answer was found."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from megatron_dyn.cli.output import console, say, spans, table
from megatron_dyn.cli.sizes import SizesAnswer, sizes_json, sizes_lines, sizes_table
from megatron_dyn.plan.job import Job
from megatron_dyn.plan.moves import moves_between
from megatron_dyn.plan.proposals import Forecast, Proposal, Refused
from megatron_dyn.records import Move

_EQUAL = 1e-9
"""Relative difference below which two step times are one: sums of floats in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """Everything `plan` found out."""

    job: Job
    chosen: Proposal
    compared: tuple[Proposal | Refused, ...]
    """All algorithms."""
    current: Forecast | None
    """A step under the layout in force, simulated; None: there is none."""
    min_gain: float
    """Fraction of the step that a move must save."""
    measured_step_seconds: float | None
    """The same, measured."""
    knows_bytes: bool
    """Whether the file has sizes."""
    notes: tuple[str, ...]
    sizes: SizesAnswer | None = None
    """Fewer stages, priced; None: not asked for."""
    forward_only_seconds: float | None = None
    """What a step of evaluation takes under the chosen layout; None: too large to be simulated operation by operation."""

    @property
    def title(self) -> str:
        """One line for pictures."""
        run = self.chosen.forecast
        return f"{self.chosen.layout.text}: step {run.step_seconds:.4g} s, bubble {run.bubble_fraction:.1%}"

    @property
    def speedup(self) -> float | None:
        """Simulated step now over simulated step then; None without a current layout, or when no step takes time."""
        if self.current is None or not self.chosen.forecast.step_seconds:
            return None
        return self.current.step_seconds / self.chosen.forecast.step_seconds

    @property
    def worth_moving(self) -> bool:
        """Whether the chosen layout is another one, and saves at least `min_gain` of the step."""
        return self.chosen.layout != self.job.template and self.saved >= max(self.min_gain, _EQUAL)

    @property
    def saved(self) -> float:
        """Fraction of the current layout's step that the chosen one saves; below 0 when it is slower."""
        if self.current is None or not self.current.step_seconds:
            return 0.0
        return 1.0 - self.chosen.forecast.step_seconds / self.current.step_seconds

    @property
    def moves(self) -> tuple[Move, ...]:
        """The layers that would move; none when that is not worth it."""
        return moves_between(self.job.template, self.chosen.layout) if self.current is not None and self.worth_moving else ()

    def gap(self, proposal: Proposal) -> float | None:
        """How much slower the slowest stage is than with `exact`, as a fraction; None when `exact` has no answer.

        Below 0 where `exact` took a slower stage for a shorter step.
        """
        exact = next((entry for entry in self.compared if entry.algorithm == "exact" and isinstance(entry, Proposal)), None)
        if exact is None:
            return None
        best, slowest = (max(entry.forecast.stage_seconds) for entry in (exact, proposal))
        return slowest / best - 1.0 if best else 0.0


def answer_json(answer: PlanAnswer) -> dict[str, Any]:
    """The answer as plain data; docs/command.md lists the keys."""
    layout, run = answer.chosen.layout, answer.chosen.forecast
    return {
        "layout": layout.text,
        "algorithm": answer.chosen.algorithm,
        "num_stages": layout.num_stages,
        "num_virtual": layout.num_virtual,
        "num_microbatches": answer.job.workload.num_microbatches,
        "stages": [
            {
                "layers": list(layout.layers_of_stage(pp_rank)),
                "seconds": seconds,
                "memory_bytes": run.stage_bytes[pp_rank] if answer.knows_bytes else None,
                "bubble": idle,
            }
            for pp_rank, (seconds, idle) in enumerate(zip(run.stage_seconds, _idle_shares(run), strict=True))
        ],
        "step_seconds": run.step_seconds,
        "step_proved": answer.chosen.split.step_proved,
        "forward_only_seconds": answer.forward_only_seconds,
        "bound_seconds": answer.chosen.split.bound_seconds,
        "bubble": run.bubble_fraction,
        "planning_seconds": answer.chosen.planning_seconds,
        "current": _current_json(answer),
        "moves": [{"layer": move.layer, "from": move.source, "to": move.destination} for move in answer.moves],
        "algorithms": [_entry_json(answer, entry) for entry in answer.compared],
        "sizes": sizes_json(answer.sizes),
        "notes": list(answer.notes),
    }


def _current_json(answer: PlanAnswer) -> dict[str, Any] | None:
    if answer.current is None:
        return None
    return {
        "layout": answer.job.template.text,
        "seconds": list(answer.current.stage_seconds),
        "step_seconds": answer.current.step_seconds,
        "measured_step_seconds": answer.measured_step_seconds,
        "bubble": answer.current.bubble_fraction,
        "speedup": answer.speedup,
        "worth_moving": answer.worth_moving,
    }


def _entry_json(answer: PlanAnswer, entry: Proposal | Refused) -> dict[str, Any]:
    if isinstance(entry, Refused):
        return {"algorithm": entry.algorithm, "refused": entry.reason}
    return {
        "algorithm": entry.algorithm,
        "layout": entry.layout.text,
        "bottleneck_seconds": max(entry.forecast.stage_seconds),
        "gap_to_exact": answer.gap(entry),
        "step_seconds": entry.forecast.step_seconds,
        "bubble": entry.forecast.bubble_fraction,
        "peak_memory_bytes": max(entry.forecast.stage_bytes) if answer.knows_bytes else None,
        "planning_seconds": entry.planning_seconds,
        "note": _note(answer, entry),
    }


def show_answer(answer: PlanAnswer) -> None:
    """Write the answer to stdout: the layout first, in a line of its own."""
    shrink = () if answer.sizes is None else sizes_lines(answer.sizes)
    seconds = answer.forward_only_seconds
    evaluation = [] if seconds is None else [f"eval:   {seconds:.4g} s simulated for a step of evaluation, forward only"]
    notes = (f"note:   {note}" for note in answer.notes)
    say(f"layout: {answer.chosen.layout.text}", *_verdict(answer), *evaluation, *shrink, *notes)
    console().print(_stage_table(answer))
    console().print(_comparison(answer))
    if answer.sizes is not None:
        console().print(sizes_table(answer.sizes))


def _verdict(answer: PlanAnswer) -> Iterator[str]:
    run = answer.chosen.forecast
    slowest = max(run.stage_seconds)
    yield (
        f"step:   {run.step_seconds:.4g} s simulated, bubble {run.bubble_fraction:.1%}, slowest stage {slowest:.4g} s "
        f"a micro-batch ({answer.job.workload.num_microbatches} micro-batches, {answer.chosen.algorithm})"
    )
    if answer.current is None:
        return
    before = max(answer.current.stage_seconds)
    measured = "" if answer.measured_step_seconds is None else f", {answer.measured_step_seconds:.4g} s measured"
    step = f"{answer.current.step_seconds:.4g} s simulated{measured}"
    yield f"now:    {answer.job.template.text}: {step}, slowest stage {before:.4g} s a micro-batch"
    if answer.worth_moving:
        moved = f"{len(answer.moves)} of {answer.chosen.layout.num_layers} layers move"
        yield f"gain:   {answer.speedup:.3f} times as fast, {moved}"
    elif answer.chosen.layout == answer.job.template:
        yield f"gain:   none, {_why_as_now(answer.chosen)}: no move"
    elif answer.saved >= _EQUAL:
        yield f"gain:   {answer.saved:.1%} of the step, less than the {answer.min_gain:.1%} of --min-gain: no move"
    else:
        yield "gain:   none, the current layout is at least as fast: no move"


def _why_as_now(chosen: Proposal) -> str:
    """What can be said of a layout in force that an algorithm leaves as it is."""
    if chosen.algorithm != "exact":
        return f"the current layout is what {chosen.algorithm} would make"
    # With many stages or virtual ones not every layout was looked at: there may be a better one.
    return "the current layout is already the best" if chosen.split.step_proved else "no better layout was found"


def _stage_table(answer: PlanAnswer) -> Table:
    layout, run = answer.chosen.layout, answer.chosen.forecast
    rows = []
    for pp_rank, (seconds, idle) in enumerate(zip(run.stage_seconds, _idle_shares(run), strict=True)):
        chunks = layout.chunks[pp_rank :: layout.num_stages]
        rows.append(
            (
                str(pp_rank),
                " | ".join(chunk.text or "-" for chunk in chunks),
                " | ".join(spans(layers) for layers in layout.layers_by_chunk(pp_rank)),
                str(len(layout.layers_of_stage(pp_rank))),
                f"{seconds:.4g}",
                _gib(run.stage_bytes[pp_rank]) if answer.knows_bytes else "-",
                f"{1.0 - idle:.1%}",
                f"{idle:.1%}",
            )
        )
    columns = ("stage", "holds", "layers", "count", "s / micro-batch", "memory GiB", "busy", "bubble")
    return table("stages", columns, rows, left=("holds", "layers"))


def _comparison(answer: PlanAnswer) -> Table:
    rows: list[Sequence[str]] = []
    for entry in answer.compared:
        name = f"{entry.algorithm} *" if entry.algorithm == answer.chosen.algorithm else entry.algorithm
        if isinstance(entry, Refused):
            rows.append((name, *("-" * 6), entry.reason.removeprefix(f"{entry.algorithm}: ")))
            continue
        gap = answer.gap(entry)
        rows.append(
            (
                name,
                f"{max(entry.forecast.stage_seconds):.4g}",
                "-" if gap is None else f"{gap:z.1%}",
                f"{entry.forecast.step_seconds:.4g}",
                f"{entry.forecast.bubble_fraction:.1%}",
                _gib(max(entry.forecast.stage_bytes)) if answer.knows_bytes else "-",
                f"{entry.planning_seconds * 1e3:.1f}",
                _note(answer, entry),
            )
        )
    columns = (
        "algorithm",
        "slowest stage s",
        "slowest stage vs exact",
        "step s",
        "bubble",
        "memory GiB",
        "planning ms",
        "note",
    )
    return table("all algorithms on these costs (* shown above)", columns, rows, left=("algorithm", "note"))


def _note(answer: PlanAnswer, entry: Proposal) -> str:
    cap, rounds = answer.job.cap_bytes, entry.split.rounds
    parts = [f"{rounds} rounds"] * (rounds is not None)
    if cap is not None and max(entry.forecast.stage_bytes) > cap:
        parts.append("over the memory cap")
    if answer.job.has_current:
        num_moves = len(moves_between(answer.job.template, entry.layout))
        parts.append("as now" if entry.layout == answer.job.template else f"moves {num_moves} layers")
    return ", ".join(parts)


def _idle_shares(forecast: Forecast) -> tuple[float, ...]:
    """By pp_rank: the share of the pipeline's time in which the stage waits.

    The forecast gives the share of all stages together, from which follows how long the pipeline runs.
    """
    if not any(forecast.busy_seconds):
        return (0.0,) * len(forecast.busy_seconds)
    pipeline_seconds = sum(forecast.busy_seconds) / len(forecast.busy_seconds) / (1.0 - forecast.bubble_fraction)
    return tuple(max(0.0, 1.0 - busy / pipeline_seconds) for busy in forecast.busy_seconds)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
