"""A timing file, whatever its form (JSON, CSV, a job's rounds.jsonl), as one record that commands work with.

Commands call `read_timing`. The form of the fields is the schema's business (`timing_schema`); here is what it cannot say:
how fields depend on each other. It must not know how layers are split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dyn.cli.document import Document, Place, parse_csv, parse_json, read_text
from megatron_dyn.cli.inferred import infer
from megatron_dyn.cli.recording import recorded_timing
from megatron_dyn.cli.timing_schema import check
from megatron_dyn.plan.speeds import Observation
from megatron_dyn.plan.workload import Workload
from megatron_dyn.records import Cost, Layout, LayoutError

_FORWARD_SHARE = 1 / 3
"""Of forward plus backward: a backward computes two products of matrices for each one of the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingFile:
    """Everything a timing file says."""

    document: Document
    """For errors that are found later."""
    layers: tuple[Cost, ...]
    """By global layer id."""
    kinds: tuple[str, ...]
    """By layer: what the file calls it, or nothing."""
    layer_parameters: tuple[int, ...] | None
    """By layer; None: the file does not say."""
    embedding: Cost
    head: Cost
    mtp: Cost
    num_mtp: int
    """MTP layers; 0: none."""
    other_seconds: float
    num_microbatches: int | None
    p2p_seconds: float | tuple[float, ...]
    speeds: tuple[float, ...] | None
    uncut: tuple[int, ...]
    pinned_first: int
    pinned_last: int
    layout: Layout | None
    """The one in force."""
    measured_step_seconds: float | None
    observations: tuple[Observation, ...]
    notes: tuple[str, ...]
    """What was assumed, one line each; every command shows them."""

    @property
    def knows_bytes(self) -> bool:
        """Whether any piece has a size."""
        pieces = (*self.layers, self.embedding, self.head, self.mtp)
        return any(piece.state_bytes or piece.activation_bytes for piece in pieces)

    def workload(self, *, num_stages: int, num_virtual: int, num_microbatches: int) -> Workload:
        """The costs for a job of that shape; raises InputError where a table by rank has another length."""
        if self.speeds is not None and len(self.speeds) != num_stages:
            raise self.document.error(("speeds",), f"expected one for each of {num_stages} stages, got {len(self.speeds)}")
        boundaries = (num_stages - 1, num_stages) if num_virtual == 1 else (num_stages,)
        if isinstance(self.p2p_seconds, tuple) and len(self.p2p_seconds) not in boundaries:
            problem = f"expected a number or a list of {boundaries[0]}, got {len(self.p2p_seconds)}"
            raise self.document.error(("p2p_seconds",), f"{problem} for {num_stages} stages of {num_virtual} chunks")
        return Workload(
            layers=self.layers,
            embedding=self.embedding,
            head=self.head,
            mtp=self.mtp,
            other_seconds=self.other_seconds,
            num_microbatches=num_microbatches,
            p2p_seconds=self.p2p_seconds,
            speeds=self.speeds,
            uncut=self.uncut,
        )


def read_timing(path: str) -> TimingFile:
    """Read `path`: .csv, .jsonl or a report directory, else JSON. Raises InputError naming file, line and field."""
    if Path(path).is_dir() or path.endswith(".jsonl"):
        return timing_of(recorded_timing(path))
    parse = parse_csv if path.lower().endswith(".csv") else parse_json
    return timing_of(parse(read_text(path), path))


def timing_of(document: Document) -> TimingFile:
    """The record of a document; raises InputError naming file, line and field."""
    check(document)
    if isinstance(document.data, list):
        whole, line_of = document.data, document.line_of
        document = Document(
            name=document.name, data={"layers": whole}, line_of=lambda place: line_of(place[1:]), notes=document.notes
        )
    data: dict[str, Any] = dict(document.data)
    layout = _layout(document, data)
    notes = list(document.notes)
    if "stages" in data:
        notes.append(_fill_inferred(document, data, layout))
    layers = tuple(_cost(document, ("layers", index), piece) for index, piece in enumerate(data["layers"]))
    if "layers" in document.data and any(not isinstance(piece, Mapping) or "seconds" in piece for piece in data["layers"]):
        notes.append("seconds of a layer count as one third forward, two thirds backward")
    if layout is not None and layout.num_layers != len(layers):
        raise document.error(("layout",), f"places {layout.num_layers} layers, layers lists {len(layers)}")
    p2p = data.get("p2p_seconds", 0.0)
    return TimingFile(
        document=document,
        layers=layers,
        kinds=tuple(piece.get("kind", "") if isinstance(piece, Mapping) else "" for piece in data["layers"]),
        layer_parameters=_parameters(document, data),
        embedding=_cost(document, ("embedding",), data.get("embedding", 0)),
        head=_cost(document, ("head",), data.get("head", 0)),
        mtp=_cost(document, ("mtp",), data.get("mtp", 0)),
        num_mtp=_num_mtp(document, data, layout),
        other_seconds=float(data.get("other_seconds", 0.0)),
        num_microbatches=None if "num_microbatches" not in data else int(data["num_microbatches"]),
        p2p_seconds=_numbers(p2p) if isinstance(p2p, list) else float(p2p),
        speeds=_numbers(data["speeds"]) if "speeds" in data else None,
        uncut=_layer_ids(document, data, len(layers)),
        pinned_first=_pinned(document, "pinned_first", len(layers)),
        pinned_last=_pinned(document, "pinned_last", len(layers)),
        layout=layout,
        measured_step_seconds=data.get("measured_step_seconds"),
        observations=_observations(document, data, len(layers), layout),
        notes=tuple(notes),
    )


def _layout(document: Document, data: Mapping[str, Any]) -> Layout | None:
    if "layout" not in data:
        return None
    num_stages = data.get("num_stages", len(data["stages"]) if "stages" in data else None)
    try:
        # The schema takes 2.0 for a whole number, as JSON does.
        return Layout.parse(data["layout"], None if num_stages is None else int(num_stages))
    except LayoutError as error:
        raise document.error(("layout",), str(error)) from error


def _fill_inferred(document: Document, data: dict[str, Any], layout: Layout | None) -> str:
    assert layout is not None, "the schema asks for a layout beside stages"
    try:
        costs = infer(layout, data["stages"])
    except ValueError as error:
        raise document.error(("stages",), str(error)) from error
    data["layers"] = list(costs.layer_seconds)
    data["embedding"], data["head"] = costs.embedding_seconds, costs.head_seconds
    if any(chunk.num_mtp for chunk in layout.chunks):
        data["mtp"] = costs.mtp_seconds
    return costs.how


def _cost(document: Document, place: Place, piece: float | Mapping[str, Any]) -> Cost:
    fields = piece if isinstance(piece, Mapping) else {"seconds": piece}
    if "num_layers" in fields and place != ("mtp",):
        raise document.error((*place, "num_layers"), "expected in mtp only")
    seconds = fields.get("seconds", 0.0)
    forward = float(fields.get("forward_seconds", seconds * _FORWARD_SHARE))
    backward = float(fields.get("backward_seconds", seconds - seconds * _FORWARD_SHARE))
    weight = float(fields.get("backward_weight_seconds", 0.0))
    if weight > backward:
        raise document.error(
            (*place, "backward_weight_seconds"), f"expected at most the backward's {backward:g}, got {weight:g}"
        )
    parameter, gradient, optimizer = (int(fields.get(f"{part}_bytes", 0)) for part in ("parameter", "gradient", "optimizer"))
    state = int(fields.get("state_bytes", parameter + gradient + optimizer))
    return Cost(
        forward_seconds=forward,
        backward_seconds=backward,
        backward_weight_seconds=weight,
        optimizer_seconds=float(fields.get("optimizer_seconds", 0.0)),
        state_bytes=state,
        activation_bytes=int(fields.get("activation_bytes", 0)),
        moved_bytes=int(fields.get("moved_bytes", parameter + optimizer or state)),
    )


def _parameters(document: Document, data: Mapping[str, Any]) -> tuple[int, ...] | None:
    values = [piece.get("parameters") if isinstance(piece, Mapping) else None for piece in data["layers"]]
    known = [int(value) for value in values if value is not None]
    if known and len(known) != len(values):
        raise document.error(("layers", values.index(None)), "expected the field 'parameters' as in other layers, got none")
    return tuple(known) or None


def _num_mtp(document: Document, data: Mapping[str, Any], layout: Layout | None) -> int:
    placed = 0 if layout is None else sum(chunk.num_mtp for chunk in layout.chunks)
    if "mtp" not in data:
        return placed
    said = data["mtp"].get("num_layers") if isinstance(data["mtp"], Mapping) else None
    if layout is not None and (not placed or said not in (None, placed)):
        raise document.error(("mtp",), f"expected the {placed} MTP layers (m) of layout {layout.text!r}, got {said or 1}")
    return placed or int(said or 1)


def _numbers(values: list[float]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def _layer_ids(document: Document, data: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    ids = [int(layer) for layer in data.get("uncut", ())]
    for index, layer in enumerate(ids):
        if not 1 <= layer < num_layers:
            raise document.error(("uncut", index), f"expected a layer from 1 to {num_layers - 1}, got {layer}")
    return tuple(sorted(set(ids)))


def _pinned(document: Document, name: str, num_layers: int) -> int:
    pinned = int(document.data.get(name, 0))
    if pinned > num_layers:
        raise document.error((name,), f"expected at most {num_layers} layers, got {pinned}")
    return pinned


def _observations(
    document: Document, data: Mapping[str, Any], num_layers: int, layout: Layout | None
) -> tuple[Observation, ...]:
    found = []
    for index, row in enumerate(data.get("observations", ())):
        assert layout is not None, "the schema asks for a layout beside observations"
        if row["layer"] >= num_layers:
            raise document.error(("observations", index), f"expected a layer below {num_layers}, got {row['layer']}")
        if row["pp_rank"] >= layout.num_stages:
            problem = f"expected a rank below the layout's {layout.num_stages} stages, got {row['pp_rank']}"
            raise document.error(("observations", index, "pp_rank"), problem)
        found.append(Observation(layer=int(row["layer"]), pp_rank=int(row["pp_rank"]), seconds=float(row["seconds"])))
    return tuple(found)
