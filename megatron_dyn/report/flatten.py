"""A RoundReport as one flat, JSON-ready mapping (see docs/reports.md for every field). Knows no files and no console."""

from typing import Any

from megatron_dyn.records import SCHEMA_VERSION, Cost, RoundReport, Snapshot


def flatten(report: RoundReport) -> dict[str, Any]:
    """One round as plain data; the keys are stable within a schema version."""
    line: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "round": report.round,
        "iteration": report.iteration,
        "outcome": report.outcome.value,
        "reason": report.reason,
        "layout_before": report.layout_before,
        "layout_after": report.layout_after,
        "moves": [{"layer": move.layer, "from": move.source, "to": move.destination} for move in report.moves],
        "predicted_before_seconds": report.predicted_before_seconds,
        "predicted_after_seconds": report.predicted_after_seconds,
        "predicted_cost_seconds": report.predicted_cost_seconds,
        "measured_before_seconds": report.measured_before_seconds,
        "measured_after_seconds": report.measured_after_seconds,
        "tokens_per_second_before": _rate(report.tokens_per_step, report.measured_before_seconds),
        "tokens_per_second_after": _rate(report.tokens_per_step, report.measured_after_seconds),
        "moved_bytes": report.moved_bytes,
        "measuring_seconds": report.measuring_seconds,
        "deciding_seconds": report.deciding_seconds,
        "moving_seconds": report.moving_seconds,
        "moved_bytes_per_second": _rate(report.moved_bytes, report.moving_seconds),
        "peak_extra_bytes": report.peak_extra_bytes,
        "speeds": None if report.speeds is None else list(report.speeds),
        "shrink_advice": report.shrink_advice,
    }
    if report.snapshot is not None:
        line |= _flatten_snapshot(report.snapshot)
    return line


def bubble_shares(snapshot: Snapshot) -> list[float]:
    """Per stage, the share of the step in which it computes nothing (0 to 1); 0 when the step time is unknown."""
    if snapshot.step_seconds <= 0:
        return [0.0 for _ in snapshot.stages]
    return [
        max(0.0, 1 - (stage.seconds * snapshot.num_microbatches + stage.optimizer_seconds) / snapshot.step_seconds)
        for stage in snapshot.stages
    ]


def _flatten_snapshot(snapshot: Snapshot) -> dict[str, Any]:
    return {
        "step_seconds": snapshot.step_seconds,
        "num_microbatches": snapshot.num_microbatches,
        "other_seconds": snapshot.other_seconds,
        "layers": [
            {"layer": layer} | _flatten_cost(cost) | ({"dynamics": dict(notes)} if notes else {})
            for layer, (cost, notes) in enumerate(
                zip(snapshot.layers, snapshot.notes or ({},) * len(snapshot.layers), strict=True)
            )
        ],
        "embedding": _flatten_cost(snapshot.embedding),
        "head": _flatten_cost(snapshot.head),
        "stages": [
            {
                "pp_rank": pp_rank,
                "forward_seconds": stage.forward_seconds,
                "backward_seconds": stage.backward_seconds,
                "wait_seconds": stage.wait_seconds,
                "optimizer_seconds": stage.optimizer_seconds,
                "state_bytes": stage.state_bytes,
                "activation_bytes": stage.activation_bytes,
                "bubble_share": bubble,
            }
            for pp_rank, (stage, bubble) in enumerate(zip(snapshot.stages, bubble_shares(snapshot), strict=True))
        ],
    }


def _flatten_cost(cost: Cost) -> dict[str, Any]:
    return {
        "forward_seconds": cost.forward_seconds,
        "backward_seconds": cost.backward_seconds,
        "state_bytes": cost.state_bytes,
        "activation_bytes": cost.activation_bytes,
        "moved_bytes": cost.moved_bytes,
    }


def _rate(amount: int, seconds: float | None) -> float | None:
    return amount / seconds if seconds else None
