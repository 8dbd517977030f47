"""What happened in a run, read from its report folder and its log: step by step, and in stretches between two events.

Pure but for reading files. Knows the format of the reports (docs/reports.md) and nothing of the plugin.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

_STEP_LINE = re.compile(r"iteration +(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+)")


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """Steps between two events."""

    first: int
    last: int
    layout: str
    began_with: str
    """What the family or the plugin did at the boundary before it; empty for the start."""
    step_seconds: float
    """The median, of the later half where there are enough steps: by then a first slow step is over."""


@dataclass(frozen=True, kw_only=True)
class Story:
    """One run. Everything by step is a list that begins with step 1."""

    step_seconds: list[float]
    layouts: list[str]
    """Megatron's syntax."""
    losses: list[float]
    changes: list[dict[str, Any]]
    """The lines of dynamics.jsonl."""
    rounds: list[dict[str, Any]]
    """The lines of rounds.jsonl."""

    @property
    def moves(self) -> list[dict[str, Any]]:
        """The rounds that moved layers."""
        return [line for line in self.rounds if line["outcome"] == "commit"]

    @property
    def events(self) -> list[tuple[int, str]]:
        """(finished iterations, what was done then), in order: what changes costs, and moves."""
        events = [(line["iteration"], line["what"]) for line in self.changes if line["changes_costs"]]
        for line in self.moves:
            layers = ", ".join(str(move["layer"]) for move in line["moves"])
            events.append((line["iteration"], f"moved layer{'s' * (len(line['moves']) > 1)} {layers}"))
        # Stable: at one boundary the family comes first, and what it did is why layers move.
        return sorted(events, key=lambda event: event[0])

    def stretches(self) -> list[Stretch]:
        """The run in stretches of one state of the model and one layout."""
        by_step: dict[int, list[str]] = {0: []}
        for step, what in self.events:
            if step < len(self.layouts):
                by_step.setdefault(step, []).append(what)
        borders = [*by_step, len(self.layouts)]
        return [
            Stretch(
                first=start + 1,
                last=end,
                layout=self.layouts[start],
                began_with="; ".join(by_step[start]),
                step_seconds=_settled(self.step_seconds[start:end]),
            )
            for start, end in zip(borders, borders[1:], strict=False)
        ]

    def layer_seconds(self) -> list[tuple[int, list[float]]]:
        """(iteration, by layer the seconds of one micro-batch) of every round that rests on measurements."""
        return [
            (line["iteration"], [layer["forward_seconds"] + layer["backward_seconds"] for layer in line["layers"]])
            for line in self.rounds
            if "layers" in line
        ]

    def layer_seconds_at(self, step: int) -> list[float] | None:
        """By layer, what a micro-batch took in step `step`: of the nearest round with the model in the same state.

        The next one comes first, since a round tells of the steps before it. None where no round saw that state.
        """
        changes = [line["iteration"] for line in self.changes if line["changes_costs"]]
        state = sum(change < step for change in changes)
        alike = [line for line in self.layer_seconds() if sum(change < line[0] for change in changes) == state]
        later = [by_layer for at, by_layer in alike if at >= step]
        return later[0] if later else alike[-1][1] if alike else None


def read_story(report: Path, log: Path) -> Story:
    """Read a finished run. Raises OSError when a file is not there, ValueError when log and report tell of other steps."""
    rounds, losses, changes = (_lines(report / f"{name}.jsonl") for name in ("rounds", "losses", "dynamics"))
    seconds = {int(step): float(ms) / 1e3 for step, ms in _STEP_LINE.findall(log.read_text(encoding="utf-8"))}
    if sorted(seconds) != [line["iteration"] for line in losses]:
        raise ValueError(f"{log}: expected a line for each of the {len(losses)} steps in {report}, got {len(seconds)}")
    return Story(
        step_seconds=[seconds[step] for step in sorted(seconds)],
        layouts=[line["layout"] for line in losses],
        losses=[float.fromhex(line["losses"]["lm loss"]) for line in losses],
        changes=changes,
        rounds=rounds,
    )


def counts_of(layout: str) -> list[int]:
    """Layers by stage of a layout without repeats of groups: `Et*3|ttL` has 3 and 2."""
    counts = []
    for stage in layout.split("|"):
        runs = re.findall(r"t(?:\*(\d+))?", stage)
        counts.append(sum(int(repeat or 1) for repeat in runs))
    return counts


def _settled(seconds: list[float]) -> float:
    return median(seconds[len(seconds) // 2 :] if len(seconds) > 3 else seconds)


def _lines(path: Path) -> list[dict[str, Any]]:
    # A family that changed nothing, or a run without a round, leaves an empty file.
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
