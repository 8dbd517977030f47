"""What `megatron-dyn simulate` says: tables for people, JSON for machines. It knows no flags and computes no plans."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dyn.cli.errors import with_own_flags
from megatron_dyn.cli.freeze_rounds import FreezeRound
from megatron_dyn.cli.output import console, say, spans, table
from megatron_dyn.cli.resize import Batch, Resize, released_nodes
from megatron_dyn.cli.rounds import Rehearsal
from megatron_dyn.cli.workloads import Trace
from megatron_dyn.cli.yardsticks import Yardsticks
from megatron_dyn.records import Layout, Outcome, Plan, RoundReport

_MAX_ROUNDS = 40
"""Beyond this only rounds that moved something are shown; --json has all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """A trace played through."""

    title: str
    trace: Trace
    rehearsal: Rehearsal
    yardsticks: Yardsticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Freezing:
    """A freeze schedule played through."""

    rounds: tuple[FreezeRound, ...]
    layout: Layout
    """Before step 0."""
    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resizing:
    """A dry run of resizes."""

    rows: tuple[Resize, ...]
    batch: Batch
    gpus_per_node: int


def show(result: Outlook | Freezing | Resizing) -> None:
    """Write a result to stdout as tables."""
    match result:
        case Outlook():
            _show_outlook(result)
        case Freezing():
            _show_freezing(result)
        case Resizing():
            _show_resizing(result)


def result_json(result: Outlook | Freezing | Resizing) -> dict[str, Any]:
    """A result as plain data (docs/simulate.md names the fields)."""
    match result:
        case Outlook():
            return _outlook_json(result)
        case Freezing():
            return _freezing_json(result)
        case Resizing():
            return _resizing_json(result)


def _outlook_json(outlook: Outlook) -> dict[str, Any]:
    rehearsal, compared = outlook.rehearsal, outlook.yardsticks
    return {
        "trace": outlook.title,
        "num_layers": outlook.trace.num_layers,
        "num_steps": outlook.trace.num_steps,
        "num_microbatches": outlook.trace.num_microbatches,
        "layout_at_start": rehearsal.layouts[0].text,
        "layout": rehearsal.layouts[-1].text,
        "num_moves": rehearsal.num_moves,
        "static_seconds": rehearsal.static_seconds,
        "policy_seconds": rehearsal.policy_seconds,
        "moving_seconds": rehearsal.moving_seconds,
        "oracle_seconds": compared.oracle_seconds,
        "hindsight_seconds": compared.hindsight_seconds,
        "hindsight_layout": compared.hindsight_layout.text,
        "speedup": _ratio(rehearsal.static_seconds, rehearsal.policy_seconds),
        "rounds": [_round_json(report) for report in rehearsal.rounds],
    }


def _round_json(report: RoundReport) -> dict[str, Any]:
    return {
        "step": report.iteration,
        "outcome": report.outcome.value,
        "reason": with_own_flags(report.reason),
        "layout": report.layout_after,
        "moved_layers": [move.layer for move in report.moves],
        "moved_bytes": report.moved_bytes,
        "moving_seconds": report.moving_seconds,
        "step_seconds_before": report.measured_before_seconds,
        "step_seconds_after": report.measured_after_seconds,
    }


def _show_outlook(outlook: Outlook) -> None:
    rehearsal, trace = outlook.rehearsal, outlook.trace
    shown = rehearsal.rounds
    if len(shown) > _MAX_ROUNDS:
        shown = tuple(report for report in shown if report.outcome is Outcome.COMMIT)
    title = f"{outlook.title}: {trace.num_layers} layers, {trace.num_steps} steps of {trace.num_microbatches} micro-batches"
    rows = [
        (
            str(report.iteration),
            "move" if report.outcome is Outcome.COMMIT else "stay",
            report.layout_after,
            _seconds(report.measured_before_seconds),
            _seconds(report.measured_after_seconds),
            with_own_flags(report.reason),
        )
        for report in shown
    ]
    columns = ("after step", "what", "layout", "step before", "step after", "why")
    if rows:
        console().print(table(title, columns, rows, left=("what", "layout", "why")))
    else:
        say(title)
    if len(shown) < len(rehearsal.rounds):
        say(f"{len(rehearsal.rounds) - len(shown)} more rounds moved nothing (--json lists them)")
    _show_totals(outlook)


def _show_totals(outlook: Outlook) -> None:
    rehearsal, compared = outlook.rehearsal, outlook.yardsticks
    static = rehearsal.static_seconds
    rows = [
        (what, _seconds(seconds), f"{_ratio(static, seconds):.3f}", layout)
        for what, seconds, layout in (
            ("first layout throughout", static, rehearsal.layouts[0].text),
            (
                "with the rounds above",
                rehearsal.policy_seconds,
                f"{rehearsal.num_moves} moves, {rehearsal.moving_seconds:.4g} s",
            ),
            ("best layout tried, throughout", compared.hindsight_seconds, compared.hindsight_layout.text),
            ("best layout at every step, moves free", compared.oracle_seconds, ""),
        )
    ]
    console().print(table("the whole run", ("what", "time", "times as fast", "how"), rows, left=("what", "how")))


def _freezing_json(freezing: Freezing) -> dict[str, Any]:
    return {
        "num_steps": freezing.num_steps,
        "ends": "exclusive",
        "layout_at_start": freezing.layout.text,
        "changes": [
            {
                "step": item.step,
                "frozen": list(item.frozen),
                "newly_frozen": list(item.newly_frozen),
                "newly_trained": list(item.newly_trained),
                "layer_seconds": [cost.seconds for cost in item.costs],
                "stage_seconds_before": list(item.stage_seconds_before),
                "stage_seconds_after": list(item.stage_seconds_after),
                "layout": item.layout.text,
                "moves": [move.layer for move in item.decision.moves] if isinstance(item.decision, Plan) else [],
                "rebuilt_stages": list(item.rebuilt_stages),
                "reason": with_own_flags(item.decision.reason),
            }
            for item in freezing.rounds
        ],
    }


def _show_freezing(freezing: Freezing) -> None:
    rows = [
        (
            str(item.step),
            "; ".join(
                f"{what} {spans(layers)}"
                for what, layers in (("freeze", item.newly_frozen), ("train", item.newly_trained))
                if layers
            ),
            spans(item.frozen),
            _list(item.stage_seconds_before),
            _what(item),
            _list(item.stage_seconds_after),
            spans(item.rebuilt_stages) if item.step else "none: built so",
            with_own_flags(item.decision.reason),
        )
        for item in freezing.rounds
    ]
    columns = ("step", "change", "frozen layers", "stage seconds", "plan", "then", "rebuilt stages", "why")
    title = f"freeze schedule over {freezing.num_steps} steps, from {freezing.layout.text}"
    console().print(table(title, columns, rows, left=("change", "frozen layers", "plan", "rebuilt stages", "why")))
    say(
        "A step counts finished iterations: [start, end] freezes in iterations start + 1 to end, so ends are exclusive.",
        "Rebuilt stages make their gradient buffers and optimizer anew: a layer changes after Megatron wrapped it, or moves.",
        "A frozen prefix is taken to compute no backward; Megatron's schedule has to be told so.",
    )


def _what(item: FreezeRound) -> str:
    if not isinstance(item.decision, Plan):
        return f"stay at {item.layout.text}"
    if item.step == 0:
        return f"start at {item.layout.text}"
    return f"move {len(item.decision.moves)} layers: {item.layout.text}"


def _resizing_json(resizing: Resizing) -> dict[str, Any]:
    return {
        "global_batch": resizing.batch.global_batch,
        "rows": [
            {
                "step": row.step,
                "size": row.size,
                "grid": None if row.grid is None else {"pp": row.grid.pp, "tp": row.grid.tp, "dp": row.grid.dp},
                "layout": None if row.layout is None else row.layout.text,
                "kept_ranks": list(row.kept),
                "released_ranks": list(row.released),
                "joined_ranks": list(row.joined),
                "released_nodes": list(released_nodes(row, resizing.gpus_per_node)),
                "moved_layers": list(row.moved_layers),
                "micro_batch": row.micro_batch,
                "num_microbatches": row.num_microbatches,
            }
            for row in resizing.rows
        ],
    }


def _show_resizing(resizing: Resizing) -> None:
    rows = [
        (
            str(row.step),
            str(row.size),
            "stop" if row.grid is None else f"{row.grid.pp}, {row.grid.tp}, {row.grid.dp}",
            "" if row.layout is None else row.layout.text,
            spans(row.kept),
            spans(row.released),
            spans(released_nodes(row, resizing.gpus_per_node)),
            spans(row.joined),
            spans(row.moved_layers),
            "" if row.grid is None else f"{row.num_microbatches} x {row.micro_batch} x dp {row.grid.dp}",
        )
        for row in resizing.rows
    ]
    columns = (
        "step",
        "GPUs",
        "pp, tp, dp",
        "layout",
        "kept",
        "released",
        "nodes free",
        "joined",
        "layers moved",
        "micro-batches",
    )
    title = f"dry run of {len(rows)} sizes, global batch {resizing.batch.global_batch} throughout"
    console().print(
        table(title, columns, rows, left=("pp, tp, dp", "layout", "kept", "released", "nodes free", "joined", "layers moved"))
    )
    say(
        "Ranks leave from the end of the order (tensor parallel fastest, then data, then pipeline), whole nodes last to first.",
        "Layers moved: those that a rank has to get because it did not hold them, or held another tensor-parallel part.",
    )


def _list(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.4g} s"


def _ratio(before: float, after: float) -> float:
    return before / after if after > 0.0 else 1.0
