"""One round as a rich table on the console of one rank: layer costs, old and new layout, what it was worth."""

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from megatron_dyn.records import NOTABLE_SPEED, Cost, Layout, Outcome, RoundReport, Snapshot
from megatron_dyn.report.flatten import bubble_shares

_MAX_LAYER_ROWS = 64
"""Beyond this the layers are left to rounds.jsonl."""


class TableSink:
    """Prints a round when it ends, and one line more whenever the step time of a commit has been measured (anew)."""

    def __init__(self, console: Console) -> None:
        """`console` is injected so that tests can record it."""
        self._console = console

    def write(self, report: RoundReport) -> None:
        """See ports.Sink."""
        if report.measured_after_seconds is not None:
            self._console.print(_verdict(report), soft_wrap=True)
        elif report.outcome is Outcome.NO_CHANGE:
            words = f"[megatron_dyn] round {report.round} after step {report.iteration}: no change: {report.reason}"
            self._console.print(Text("\n".join([words, *_notes(report)])), soft_wrap=True)
        else:
            self._console.print(render_round(report), soft_wrap=True)

    def close(self) -> None:
        """See ports.Sink."""


def render_round(report: RoundReport) -> Group:
    """Everything known when the round ended."""
    title = Text(f"[megatron_dyn] round {report.round} after step {report.iteration}: {report.outcome.value}", "bold")
    parts: list[Table | Text] = [title, Text(report.reason)]
    if report.snapshot is not None:
        parts += [_layer_table(report.snapshot), _stage_table(report, report.snapshot)]
    parts.append(Text(f"layout {report.layout_before}  ->  {report.layout_after}  ({len(report.moves)} layers moved)"))
    parts.append(_figures(report))
    parts += [Text(note) for note in _notes(report)]
    return Group(*parts)


def _notes(report: RoundReport) -> list[str]:
    """What the user should know beside the round: ranks that are slow, and stages that are not needed."""
    notes = [
        f"pp_rank {pp_rank} is slow: {speed:.2f} times the median speed for the same layer; look at the machine"
        for pp_rank, speed in enumerate(report.speeds or ())
        if speed is not None and speed < 1.0 / (1.0 + NOTABLE_SPEED)
    ]
    return notes if report.shrink_advice is None else [*notes, report.shrink_advice]


def _layer_table(snapshot: Snapshot) -> Table:
    table = Table(title="cost per micro-batch", title_justify="left")
    for column in ("piece", "stage", "forward ms", "backward ms", "state MiB", "activations MiB"):
        table.add_column(column, justify="left" if column == "piece" else "right")
    last = snapshot.layout.num_stages - 1
    table.add_row("embedding", "0", *_cost_cells(snapshot.embedding))
    if len(snapshot.layers) <= _MAX_LAYER_ROWS:
        for layer, (cost, stage) in enumerate(zip(snapshot.layers, snapshot.layout.stage_of(), strict=True)):
            table.add_row(f"layer {layer}", str(stage), *_cost_cells(cost))
    table.add_row("norm, head, loss", str(last), *_cost_cells(snapshot.head))
    return table


def _stage_table(report: RoundReport, snapshot: Snapshot) -> Table:
    table = Table(title="stages, before the move", title_justify="left")
    for column in ("stage", "layers before", "layers after", "busy ms / micro-batch", "waiting s / step", "bubble"):
        table.add_column(column, justify="right")
    after = Layout.parse(report.layout_after, snapshot.layout.num_stages)
    for pp_rank, (stage, bubble) in enumerate(zip(snapshot.stages, bubble_shares(snapshot), strict=True)):
        table.add_row(
            str(pp_rank),
            _span(snapshot.layout.layers_of_stage(pp_rank)),
            _span(after.layers_of_stage(pp_rank)),
            f"{stage.seconds * 1e3:.2f}",
            f"{stage.wait_seconds:.3f}",
            f"{bubble:.0%}",
        )
    return table


def _figures(report: RoundReport) -> Text:
    seconds = (
        f"measuring {report.measuring_seconds:.3f} s, deciding {report.deciding_seconds * 1e3:.1f} ms, "
        f"moving {report.moving_seconds:.3f} s ({report.moved_bytes / 2**20:.1f} MiB"
    )
    if report.moving_seconds:
        seconds += f", {report.moved_bytes / report.moving_seconds / 2**20:.0f} MiB/s"
    if report.peak_extra_bytes is not None:
        seconds += f", {report.peak_extra_bytes / 2**20:.1f} MiB more memory at the peak"
    seconds += ")"
    if report.predicted_before_seconds is None or report.predicted_after_seconds is None:
        return Text(seconds)
    how = "measured" if report.measured_before_seconds else "simulated"
    return Text(
        f"step time {how} {report.predicted_before_seconds:.3f} s, predicted {report.predicted_after_seconds:.3f} s; {seconds}"
    )


def _verdict(report: RoundReport) -> Text:
    before, after = report.measured_before_seconds, report.measured_after_seconds
    words = f"[megatron_dyn] round {report.round}: step time under {report.layout_after} measured {after:.3f} s"
    if report.predicted_after_seconds is not None:
        words += f" (predicted {report.predicted_after_seconds:.3f} s)"
    if before and after:
        words += f", before {before:.3f} s: {before / after:.2f} times as fast"
        if report.tokens_per_step:
            words += f", {report.tokens_per_step / before:,.0f} -> {report.tokens_per_step / after:,.0f} tokens/s"
    return Text(words, "bold")


def _cost_cells(cost: Cost) -> tuple[str, str, str, str]:
    return (
        f"{cost.forward_seconds * 1e3:.2f}",
        f"{cost.backward_seconds * 1e3:.2f}",
        f"{cost.state_bytes / 2**20:.1f}",
        f"{cost.activation_bytes / 2**20:.2f}",
    )


def _span(layers: tuple[int, ...]) -> str:
    if not layers:
        return "none"
    return f"{layers[0]}" if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
