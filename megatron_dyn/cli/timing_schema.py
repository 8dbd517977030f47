"""The published schema of timing files: loads it, checks documents against it in words, and lists its fields.

Used by `timing_file`, by `megatron-dyn schema` and by the documentation. The rules themselves are in timing.schema.json.
"""

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any

import jsonschema

from megatron_dyn.cli.document import Document, Place
from megatron_dyn.cli.errors import InputError

_MAX_SHOWN = 60
"""Longest value that an error repeats."""
_UNKNOWN = "unknown field"
_WORDS = {"array": "a list", "object": "an object", "number": "a number", "integer": "a whole number", "string": "a text"}


def schema_text() -> str:
    """The schema as published (JSON Schema, draft 2020-12)."""
    return files("megatron_dyn.cli").joinpath("timing.schema.json").read_text(encoding="utf-8")


def check(document: Document) -> None:
    """Raise InputError at the first line of `document` that the schema does not allow."""
    if not isinstance(document.data, list | dict):
        # Its fields would be looked for in what has none.
        raise document.error((), f"expected a list or an object, got {_show(document.data)}")
    validator = jsonschema.Draft202012Validator(json.loads(schema_text()))
    errors = [_describe(error) for error in validator.iter_errors(document.data)]
    if errors:
        raise _first(document, errors)


def field_rows() -> Iterator[tuple[str, str, str]]:
    """(Name, type, description) of every field, for the documentation: those of the file, then those of a cost."""
    definitions = json.loads(schema_text())["$defs"]
    for part in ("timing", "cost"):
        for name, field in definitions[part]["properties"].items():
            yield f"{'cost.' * (part == 'cost')}{name}", _type_name(field, definitions), field["description"]


def _first(document: Document, errors: Sequence[tuple[Place, str]]) -> InputError:
    # Places in a document are few when something is wrong with them; with thousands the first ones do.
    lined = [(document.line_of(place) or 0, not problem.startswith(_UNKNOWN), place, problem) for place, problem in errors[:20]]
    # A name that was mistyped is missed as well: of the two, name the cause.
    _, _, place, problem = min(lined, key=lambda error: error[:2])
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    return document.error(place, problem + more)


def _describe(error: jsonschema.ValidationError) -> tuple[Place, str]:
    place, shown = tuple(error.absolute_path), _show(error.instance)
    match error.validator:
        case "type":
            names = [error.validator_value] if isinstance(error.validator_value, str) else error.validator_value
            return place, f"expected {' or '.join(_WORDS[name] for name in names)}, got {shown}"
        case "additionalProperties":
            unknown = next(name for name in error.instance if name not in error.schema["properties"])
            return (*place, unknown), _unknown_field(unknown, list(error.schema["properties"]))
        case "required":
            missing = [name for name in error.validator_value if name not in error.instance]
            return place, f"expected the field {missing[0]!r}, got {shown}"
        case "dependentRequired":
            field, needed = next(
                (f, n) for f, n in error.validator_value.items() if f in error.instance and n[0] not in error.instance
            )
            return (*place, field), f"expected {needed[0]} beside it, got none"
        case "oneOf" | "not":
            return place, f"{error.schema['description']}, got {', '.join(error.instance) or 'no field'}"
        case "minItems" | "maxItems":
            return place, f"expected at {_bound(error)} item{'s' * (error.validator_value != 1)}, got {len(error.instance)}"
        case "exclusiveMinimum":
            return place, f"expected more than {error.validator_value}, got {shown}"
        case "minimum" | "maximum":
            return place, f"expected at {_bound(error)}, got {shown}"
        case _:
            return place, error.message


def _bound(error: jsonschema.ValidationError) -> str:
    return f"{'least' if error.validator.startswith('min') else 'most'} {error.validator_value:g}"


def _unknown_field(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"
    return f"{_UNKNOWN}, {hint}"


def _show(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _type_name(field: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    reference = field.get("$ref", "").rpartition("/")[2]
    if reference == "layer":
        return "number or cost"
    kinds = definitions[reference]["type"] if reference else field["type"]
    kinds = [kinds] if isinstance(kinds, str) else kinds
    names = {"integer": "whole number", "array": "list", "string": "text"}
    return " or ".join(names.get(kind, kind) for kind in kinds)
