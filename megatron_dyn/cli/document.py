"""Text of a JSON or CSV file as plain data in which every place can still be named by its line.

Used by `timing_file` and `recording`. It must not know what the fields mean: `timing_schema` does.
"""

import csv
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_dyn.cli.errors import InputError

Place = tuple[str | int, ...]
"""Keys and indices from the root of a document to a value."""

_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
"""What JSON calls a number; `nan`, `inf`, `1_000` and `0x10` are none."""
_CONSTANTS = ("NaN", "Infinity", "-Infinity")
_ENDS = ("embedding", "head", "mtp")
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """Data and where it stands."""

    name: str
    """How errors call the file."""
    data: Any
    """Lists, dicts, strings, numbers, booleans, None."""
    line_of: Callable[[Place], int | None]
    """The 1-based line of a place, the nearest one above it that is known; None where there is none."""
    notes: tuple[str, ...] = ()
    """What the reader did that its user should know."""

    def error(self, place: Place, problem: str) -> InputError:
        """An error at `place`; to be raised by the caller."""
        line = self.line_of(place)
        where = self.name if line is None else f"{self.name}:{line}"
        return InputError(f"{where}: {field_name(place)}: {problem}" if place else f"{where}: {problem}")


class _Refused(Exception):
    """A duplicate key or a constant that is no number; its argument is the text."""


def field_name(place: Place) -> str:
    """A place as users write it: `layers[3].seconds`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return text.removeprefix(".")


def read_text(path: str) -> str:
    """The content of a text file; raises InputError naming it."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected text in UTF-8, got byte {error.object[error.start]:#x} at {error.start}") from error


def parse_json(text: str, name: str) -> Document:
    """Strict JSON: no duplicate keys, no NaN or Infinity. Raises InputError naming `name`, the line and what is wrong."""
    try:
        data = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InputError(f"{name}:{error.lineno}: not JSON: {error.msg}, at column {error.colno}") from error
    except _Refused as error:
        token = error.args[0]
        line = _line_of_refused(text, token)
        problem = "expected a number" if token in _CONSTANTS else "expected each field once"
        raise InputError(f"{name}{'' if line is None else f':{line}'}: {problem}, got {token!r}") from error
    except (RecursionError, ValueError) as error:
        # Thousands of brackets, or a number of thousands of digits: Python gives up before the parser does.
        raise InputError(f"{name}: not JSON that can be read: {error}") from error
    return Document(name=name, data=data, line_of=lambda place: _line_in_json(text, place))


def parse_csv(text: str, name: str) -> Document:
    """One row a layer under a header of field names; rows called embedding, head or mtp in the column `layer` are those.

    Empty cells are absent fields. Raises InputError for tables that are none; fields are left to the schema.
    """
    reader = csv.reader(text.splitlines(), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise InputError(f"{name}:{reader.line_num}: not CSV: {error}") from error
    if not rows:
        raise InputError(f"{name}: expected a header and one row a layer, got an empty file")
    header = [cell.strip() for cell in rows[0][1]]
    if len(set(header)) != len(header) or "" in header:
        raise InputError(f"{name}:{rows[0][0]}: expected a header of different field names, got {','.join(header)!r}")
    data: dict[str, Any] = {"layers": []}
    lines: dict[Place, int] = {(): rows[0][0]}
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise InputError(f"{name}:{line}: expected {len(header)} cells as in the header, got {len(row)}")
        cells = {field: _cell(field, text) for field, text in zip(header, row, strict=True) if text.strip()}
        index = len(data["layers"])
        layer = cells.pop("layer", index)
        place: Place = ("layers", index)
        if layer in _ENDS and layer not in data:
            place = (str(layer),)
            data[str(layer)] = cells
        elif layer == index:
            data["layers"].append(cells)
        else:
            ends = ", ".join(end for end in _ENDS if end not in data)
            raise InputError(f"{name}:{line}: layer: expected {index}{f' or {ends}' * bool(ends)}, got {layer!r}")
        lines[place] = line
    return Document(name=name, data=data, line_of=lambda place: lines.get(place[:2], lines.get(place[:1], lines[()])))


def _cell(field: str, text: str) -> str | int | float:
    text = text.strip()
    if field == "kind" or not _NUMBER.fullmatch(text) or len(text) > 300:
        return text
    return int(text) if text.lstrip("-").isdecimal() else float(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _Refused(key)
        made[key] = value
    return made


def _refuse_constant(text: str) -> None:
    raise _Refused(text)


def _compose(text: str) -> yaml.Node | None:
    """The nodes of JSON text, read as YAML, of which it is a part; None for the few strings that YAML reads otherwise."""
    try:
        # JSON allows tabs between tokens (and nowhere else), YAML does not.
        return yaml.compose(text.replace("\t", " "), Loader=_LOADER)
    except yaml.YAMLError:
        return None


def _line_in_json(text: str, place: Place) -> int | None:
    node = _compose(text)
    if node is None:
        return None
    line: int = node.start_mark.line + 1
    for step in place:
        here = _child(node, step)
        if here is None:
            break
        line, node = here[0].start_mark.line + 1, here[1]
    return line


def _child(node: yaml.Node, step: str | int) -> Sequence[yaml.Node] | None:
    """(Node to point at, node to go on from): for a field that is its name, and its value."""
    if isinstance(node, yaml.MappingNode):
        return next(((key, value) for key, value in node.value if key.value == step), None)
    if isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
        return node.value[step], node.value[step]
    return None


def _line_of_refused(text: str, token: str) -> int | None:
    node = _compose(text)
    lines = [] if node is None else list(_refused_lines(node, token))
    return lines[0] if lines else None


def _refused_lines(node: yaml.Node, token: str) -> Iterator[int]:
    """Lines of keys that come twice and are `token`, and of bare constants that are, in the order of the text."""
    if isinstance(node, yaml.MappingNode):
        seen = set()
        for key, value in node.value:
            if key.value in seen and key.value == token:
                yield key.start_mark.line + 1
            seen.add(key.value)
            yield from _refused_lines(value, token)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _refused_lines(item, token)
    elif token in _CONSTANTS and node.value == token and not node.style:
        yield node.start_mark.line + 1
