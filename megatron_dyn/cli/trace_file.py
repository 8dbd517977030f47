"""Trace files: frames of layer costs, JSON in and out. The form is published in trace.schema.json.

A frame is read as a timing file is, so that a layer means the same in both and errors name the line. Used by `simulate`;
it must not know what is done with a trace.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from itertools import pairwise
from typing import Any

from megatron_dyn.cli.arguments import MAX_STEPS
from megatron_dyn.cli.document import Document, Place, parse_json, read_text
from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.output import write_file
from megatron_dyn.cli.timing_file import timing_of
from megatron_dyn.cli.workloads import DEFAULT_MICROBATCHES, Frame, Trace
from megatron_dyn.records import Cost

_FIELDS = ("frames", "steps", "num_microbatches", "embedding", "head", "p2p_seconds", "layout", "num_stages", "source")
_COST_FIELDS = frozenset(asdict(Cost()))
_FULL = {"forward_seconds", "backward_seconds", "state_bytes", "moved_bytes"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part(Document):
    """A part of a document that is read like one, with errors that name the place in the whole."""

    whole: Document
    place: Place

    def error(self, place: Place, problem: str) -> InputError:
        return self.whole.error((*self.place, *place), problem)


def trace_schema_text() -> str:
    """The schema as published (JSON Schema, draft 2020-12); it refers to that of timing files."""
    return files("megatron_dyn.cli").joinpath("trace.schema.json").read_text(encoding="utf-8")


def read_trace(path: str) -> Trace:
    """The trace in a file; raises InputError that names file, line and field, expected and actual."""
    document = parse_json(read_text(path), path)
    if isinstance(document.data, list):
        whole, line_of = document.data, document.line_of
        document = Document(name=path, data={"frames": whole}, line_of=lambda place: line_of(place[1:]))
    data = document.data
    if not isinstance(data, Mapping):
        raise document.error((), f"expected a list of frames or an object, got {json.dumps(data)[:60]}")
    for name in data:
        if name not in _FIELDS:
            raise document.error((name,), f"unknown field, expected one of {', '.join(_FIELDS)}")
    frames = _frames(document)
    rest = {name: value for name, value in data.items() if name not in ("frames", "steps")}
    timing = timing_of(Document(name=path, data=rest | {"layers": data["frames"][0]["layers"]}, line_of=document.line_of))
    if isinstance(timing.p2p_seconds, tuple):
        raise document.error(("p2p_seconds",), "expected one number")
    last = max(1, frames[-1].step)
    num_steps = _whole(document, ("steps",), data.get("steps", last), at_least=last)
    return Trace(
        frames=frames,
        num_steps=num_steps,
        num_microbatches=timing.num_microbatches or DEFAULT_MICROBATCHES,
        embedding=timing.embedding,
        head=timing.head,
        p2p_seconds=timing.p2p_seconds,
        layout=timing.layout,
    )


def write_trace(trace: Trace, flag: str, path: str) -> None:
    """Write a file that `read_trace` turns into an equal trace; raises InputError naming the flag and the path."""
    table: dict[str, Any] = {"steps": trace.num_steps, "num_microbatches": trace.num_microbatches}
    table |= {name: asdict(cost) for name, cost in (("embedding", trace.embedding), ("head", trace.head)) if cost != Cost()}
    table["p2p_seconds"] = trace.p2p_seconds
    if trace.layout is not None:
        # Without the number of stages chunks that share one would be read as stages of their own.
        table |= {"layout": trace.layout.text, "num_stages": trace.layout.num_stages}
    lines = [json.dumps({"step": frame.step, "layers": [asdict(cost) for cost in frame.layers]}) for frame in trace.frames]
    # A frame a line: an error names the line, and a diff of two traces can be read.
    head = json.dumps(table).removesuffix("}")
    write_file(flag, path, head + ', "frames": [\n' + ",\n".join(lines) + "\n]}\n")


def _frames(document: Document) -> tuple[Frame, ...]:
    rows = document.data.get("frames")
    if not isinstance(rows, list) or not rows:
        raise document.error(("frames",) if "frames" in document.data else (), "expected frames, a list of at least 1")
    frames = tuple(_frame(document, index, row) for index, row in enumerate(rows))
    if frames[0].step > 1:
        raise document.error(("frames", 0, "step"), f"expected 1, the first iteration, got {frames[0].step}")
    for index, (before, frame) in enumerate(pairwise(frames), start=1):
        if frame.step <= before.step:
            raise document.error(("frames", index, "step"), f"expected more than {before.step}, got {frame.step}")
        if len(frame.layers) != len(before.layers):
            problem = f"expected {len(before.layers)} layers as in the frames before, got {len(frame.layers)}"
            raise document.error(("frames", index, "layers"), problem)
    return frames


def _frame(document: Document, index: int, row: object) -> Frame:
    place: Place = ("frames", index)
    if not isinstance(row, Mapping) or set(row) != {"step", "layers"}:
        raise document.error(place, f"expected an object with step and layers, got {json.dumps(row)[:60]}")
    step = _whole(document, (*place, "step"), row["step"], at_least=0)
    layers = row["layers"]
    if isinstance(layers, list) and layers and all(_is_full(piece) for piece in layers):
        # What `write_trace` writes: checking 1,000 frames of 32 layers against a schema would take over 10 s.
        return Frame(step=step, layers=tuple(Cost(**piece) for piece in layers))
    part = _Part(name=document.name, data={"layers": layers}, line_of=document.line_of, whole=document, place=place)
    return Frame(step=step, layers=timing_of(part).layers)


def _is_full(piece: object) -> bool:
    """Whether a layer leaves nothing to be filled in, and nothing to complain about."""
    if not isinstance(piece, dict) or not piece.keys() >= _FULL or not piece.keys() <= _COST_FIELDS:
        return False
    most = {name: (2**50 if name.endswith("_bytes") else 1e9) for name in piece}
    kinds = {name: (int,) if name.endswith("_bytes") else (int, float) for name in piece}
    right = all(type(value) in kinds[name] and 0 <= value <= most[name] for name, value in piece.items())
    return right and bool(piece.get("backward_weight_seconds", 0.0) <= piece["backward_seconds"])


def _whole(document: Document, place: Sequence[str | int], value: object, *, at_least: int) -> int:
    if isinstance(value, float) and value.is_integer():
        # What the schema takes for a whole number as well, as JSON does.
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= MAX_STEPS:
        raise document.error(
            tuple(place), f"expected a whole number from {at_least} to {MAX_STEPS}, got {json.dumps(value)[:60]}"
        )
    return value
