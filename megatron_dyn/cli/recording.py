"""A timing file from what a real run reported: `rounds.jsonl` as docs/reports.md describes it.

Used by `record` and by whoever reads timing files. It must not know how files are planned with.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_dyn.cli.document import Document, read_text
from megatron_dyn.cli.errors import InputError
from megatron_dyn.plan.speeds import changes_of_stayed, drift_of
from megatron_dyn.plan.workload import Workload, workload_of
from megatron_dyn.records import SCHEMA_VERSION, Cost, Layout, LayoutError, Snapshot, StageReading

_NEEDED = ("embedding", "head", "layers", "num_microbatches", "other_seconds", "stages", "step_seconds")
"""What a round has that measured something."""

_COST_FIELDS = (
    "forward_seconds",
    "backward_seconds",
    "backward_weight_seconds",
    "state_bytes",
    "activation_bytes",
    "moved_bytes",
)
"""Of a layer or an end; the first two are always there."""
_STAGE_FIELDS = ("optimizer_seconds", "state_bytes")
_KINDS: Mapping[str, Any] = {
    "a list": list,
    "an object": Mapping,
    "a text": str,
    "a whole number": int,
    "a number": int | float,
}
_MOST = 1e18
"""Above all bytes and seconds that a run reports."""
_LEAST_SECONDS = 1e-9
"""No layer is faster: a time below that was not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One line of rounds.jsonl that rests on measurements."""

    number: int
    line: int
    """1-based line of the file."""
    layout: Layout
    """The one that was measured: before the move, if there was any."""
    data: Mapping[str, Any]

    @property
    def seconds(self) -> tuple[float, ...]:
        """By layer: forward plus backward of one micro-batch; 0 where that is too little to be compared."""
        sums = (piece["forward_seconds"] + piece["backward_seconds"] for piece in self.data["layers"])
        return tuple(seconds if seconds >= _LEAST_SECONDS else 0.0 for seconds in sums)


def recorded_timing(path: str, number: int | None = None) -> Document:
    """The timing file of round `number` (the last with that number; None: the last that measured) below `path`.

    `path` is a rounds.jsonl or the folder with one. Raises InputError when there is no such round, or for a damaged one.
    """
    name = str(Path(path) / "rounds.jsonl") if Path(path).is_dir() else path
    rounds, notes = _measured_rounds(name)
    chosen = [entry for entry in rounds if number in (None, entry.number)]
    if not chosen:
        known = ", ".join(str(entry.number) for entry in rounds) or "none"
        wanted = "a round that measured" if number is None else f"round {number}"
        raise InputError(f"{name}: expected {wanted} (rounds of forced layouts measure nothing), measured rounds: {known}")
    data = _timing(chosen[-1], rounds, name)
    return Document(name=name, data=data, line_of=lambda place: chosen[-1].line, notes=notes)


def _measured_rounds(name: str) -> tuple[list[Round], tuple[str, ...]]:
    rounds, notes = [], []
    for line, text in enumerate(read_text(name).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            data = json.loads(text)
        except (ValueError, RecursionError):
            # A job that was killed while writing left half a line; the rounds around it are good.
            notes.append(f"{name}:{line}: half a line, left out")
            continue
        if (entry := _round(name, line, data)) is not None:
            rounds.append(entry)
    return rounds, tuple(notes)


def _round(name: str, line: int, data: object) -> Round | None:
    """The round, or None for one that did not measure; raises InputError for a line that is no round."""
    where = f"{name}:{line}"
    if not isinstance(data, Mapping) or not {"schema_version", "round", "layout_before"} <= data.keys():
        raise InputError(f"{where}: expected a round as in docs/reports.md, got {json.dumps(data)[:60]}")
    if data["schema_version"] != SCHEMA_VERSION:
        raise InputError(f"{where}: schema_version: expected {SCHEMA_VERSION}, got {data['schema_version']!r}")
    if "layers" not in data:
        return None
    if isinstance(number := data["round"], float) and number.is_integer():
        # JSON takes 2.0 for a whole number; tools that rewrite a report may have written it so.
        data = {**data, "round": int(number)}
    if missing := [field for field in _NEEDED if field not in data]:
        raise InputError(f"{where}: expected the field {missing[0]!r}")
    for place, value, expected in _fields(where, data):
        if isinstance(value, bool) or not isinstance(value, _KINDS[expected]) or not _is_usual(value):
            raise InputError(f"{where}: {place}: expected {expected}, got {json.dumps(value)[:60]}")
    try:
        layout = Layout.parse(data["layout_before"], len(data["stages"]))
        layout.check_num_layers(len(data["layers"]))
    except LayoutError as error:
        raise InputError(f"{where}: layout_before: {error}") from error
    return Round(number=data["round"], line=line, layout=layout, data=data)


def _fields(where: str, data: Mapping[str, Any]) -> Iterator[tuple[str, object, str]]:
    """(Place, value, what it has to be) of all that is read of a round; containers come before what is in them.

    Raises InputError for a piece without times. Signs are left to the schema of timing files.
    """
    yield from (("round", data["round"], "a whole number"), ("layout_before", data["layout_before"], "a text"))
    yield "other_seconds", data["other_seconds"], "a number"
    if data["step_seconds"] is not None:
        yield "step_seconds", data["step_seconds"], "a number"
    yield from ((name, data[name], "a list") for name in ("layers", "stages"))
    pieces = [(name, data[name]) for name in ("embedding", "head")]
    pieces += [(f"layers[{layer}]", piece) for layer, piece in enumerate(data["layers"])]
    for place, piece in pieces:
        yield place, piece, "an object"
        if missing := [field for field in _COST_FIELDS[:2] if field not in piece]:
            raise InputError(f"{where}: {place}: expected the field {missing[0]!r}")
        yield from ((f"{place}.{field}", piece[field], "a number") for field in _COST_FIELDS if field in piece)
    for pp_rank, stage in enumerate(data["stages"]):
        yield f"stages[{pp_rank}]", stage, "an object"
        yield from ((f"stages[{pp_rank}].{field}", stage[field], "a number") for field in _STAGE_FIELDS if field in stage)


def _is_usual(value: object) -> bool:
    """False for numbers that would fail in the arithmetic that follows: NaN, infinity, integers that no float holds."""
    return not isinstance(value, int | float) or abs(value) < _MOST


def _timing(entry: Round, rounds: Sequence[Round], name: str) -> dict[str, Any]:
    data, work = entry.data, _workload(entry)
    layers = [
        _cost(piece) | _optimizer(cost.optimizer_seconds) for piece, cost in zip(data["layers"], work.layers, strict=True)
    ]
    timing: dict[str, Any] = {
        "source": f"{name}, round {entry.number}, after step {data.get('iteration')}",
        "layout": entry.layout.text,
        "num_stages": entry.layout.num_stages,
        "num_microbatches": data["num_microbatches"],
        "other_seconds": work.other_seconds,
        "layers": layers,
        "embedding": _cost(data["embedding"]),
        "head": _cost(data["head"]),
    }
    if data["step_seconds"]:
        timing["measured_step_seconds"] = data["step_seconds"]
    _share_rest(timing, entry, work)
    if observations := _observations(entry, rounds):
        timing["observations"] = observations
    return timing


def _cost(piece: Mapping[str, Any]) -> dict[str, Any]:
    """What both kinds of file have; later versions of the report may have more."""
    return {field: piece[field] for field in _COST_FIELDS if field in piece}


def _optimizer(seconds: float) -> dict[str, float]:
    return {"optimizer_seconds": seconds} if seconds > 0.0 else {}


def _workload(entry: Round) -> Workload:
    """What the job itself would plan with: how a stage's measurements are shared out is decided there."""
    data = entry.data
    snapshot = Snapshot(
        iteration=0,
        layout=entry.layout,
        layers=tuple(Cost(**_cost(piece)) for piece in data["layers"]),
        embedding=Cost(**_cost(data["embedding"])),
        head=Cost(**_cost(data["head"])),
        other_seconds=data["other_seconds"],
        stages=tuple(
            StageReading(
                forward_seconds=0.0,
                backward_seconds=0.0,
                wait_seconds=0.0,
                optimizer_seconds=stage.get("optimizer_seconds", 0.0),
                state_bytes=stage.get("state_bytes", 0),
                activation_bytes=0,
            )
            for stage in data["stages"]
        ),
        step_seconds=0.0,
        num_microbatches=1,
    )
    return workload_of(snapshot)


def _share_rest(timing: dict[str, Any], entry: Round, work: Workload) -> None:
    """Give the ends of each stage, by their state, what its layers leave of its optimizer time: a run measures the whole."""
    for pp_rank, stage in enumerate(entry.data["stages"]):
        chunks = entry.layout.chunks[pp_rank :: entry.layout.num_stages]
        holds = (("embedding", "embedding"), ("head", "loss"))
        ends = [timing[name] for name, what in holds if any(getattr(chunk, what) for chunk in chunks)]
        rest = stage.get("optimizer_seconds", 0.0)
        rest -= math.fsum(work.layers[layer].optimizer_seconds for layer in entry.layout.layers_of_stage(pp_rank))
        total = sum(end.get("state_bytes", 0) for end in ends)
        for end in ends:
            # Without the state of the stage nothing is known of its layers' share either.
            if total and stage.get("state_bytes"):
                end |= _optimizer(rest * end.get("state_bytes", 0) / total)


def _observations(entry: Round, rounds: Sequence[Round]) -> list[dict[str, Any]]:
    """What layers took on the ranks they were on, in all rounds, as if at the time of `entry`; none before a move.

    Costs of all layers may drift while the model trains (pruning, longer sequences). Without taking that out, the rank
    that a layer came to later would look faster or slower. Rounds of another job in the same file do not compare.
    """
    comparable = [
        other
        for other in rounds
        if (other.layout.num_stages, other.layout.num_layers) == (entry.layout.num_stages, entry.layout.num_layers)
    ]
    if len({other.layout for other in comparable}) == 1:
        return []
    drifts = _drifts(comparable)
    now = next(drift for other, drift in zip(comparable, drifts, strict=True) if other.line == entry.line)
    return [
        {"layer": layer, "pp_rank": pp_rank, "seconds": seconds * now / drift}
        for other, drift in zip(comparable, drifts, strict=True)
        for layer, (pp_rank, seconds) in enumerate(zip(other.layout.stage_of(), other.seconds, strict=True))
        if seconds > 0.0
    ]


def _drifts(rounds: Sequence[Round]) -> list[float]:
    """By round: how many times as much as in the first one layers cost, judged from round to round by those that stayed.

    By the rule of a running job: the median over the layers whose rank is the same.
    """
    drifts = [1.0]
    timed = [tuple(zip(entry.layout.stage_of(), entry.seconds, strict=True)) for entry in rounds]
    for before, after in pairwise(timed):
        drifts.append(drifts[-1] * drift_of(changes_of_stayed(before, after)))
    return drifts
