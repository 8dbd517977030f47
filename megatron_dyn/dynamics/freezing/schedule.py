"""Schedules of freezing: which layers are frozen when. Pure; the command's dry run reads the same text.

A schedule step is a number of finished iterations, as in classic NeMo: `[10, 100]` freezes a range from iteration 11 to
iteration 100, ends exclusive. It must not know how a model is frozen.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_dyn.config import ConfigError

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_MAX_STEP = 1_000_000_000
"""Steps beyond any run: a number of thousands of digits could not even be printed."""
_FOREVER = -1
EMBEDDING = "embedding"
"""The key of a schedule for the embedding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRange:
    """Layers that are frozen together, and when."""

    first_layer: int
    """-1, with `last_layer` -1, for the embedding."""
    last_layer: int
    """Inclusive."""
    start: int
    """Iterations that are finished when the layers freeze; 0: before the first."""
    end: int | None
    """Iterations that are finished when they train again (exclusive); None: never."""

    def holds(self, step: int) -> bool:
        """Whether they are frozen in the iteration after `step` finished ones."""
        return self.start <= step and (self.end is None or step < self.end)


@dataclass(frozen=True, slots=True)
class FreezeSchedule:
    """Which layers are frozen when. Ranges may overlap: a layer is frozen while any of its ranges says so."""

    ranges: tuple[FrozenRange, ...]

    @classmethod
    def of_table(
        cls, table: object, *, flag: str, num_layers: int, shown: str, with_embedding: bool = False
    ) -> "FreezeSchedule":
        """From `{"0-7": [0, 200], "8-15": [50, -1], "16": 100}`: layers, then start and end, or the end alone.

        An end of -1 is never; the key `embedding` is known with `with_embedding`. `shown` is the text, for messages. Raises
        ConfigError that names `flag` and the range, what was expected and what was found.
        """
        if not isinstance(table, Mapping) or not table:
            raise ConfigError(f'{flag}: expected an object such as {{"0-7": [0, 200]}}, got {shown.strip()[:60]!r}')
        return cls(tuple(_range_of(flag, name, when, num_layers, with_embedding) for name, when in table.items()))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which layers freeze or train again, ascending; some may change nothing where ranges overlap."""
        return tuple(sorted({step for item in self.ranges for step in (item.start, item.end) if step is not None}))

    def frozen(self, step: int) -> frozenset[int]:
        """Ids of the layers that are frozen in the iteration after `step` finished ones."""
        return frozenset(
            layer
            for item in self.ranges
            if item.holds(step) and item.first_layer >= 0
            for layer in range(item.first_layer, item.last_layer + 1)
        )

    def embedding_frozen(self, step: int) -> bool | None:
        """Whether the embedding is frozen then; None where the schedule does not name it."""
        named = [item for item in self.ranges if item.first_layer < 0]
        return any(item.holds(step) for item in named) if named else None


def _range_of(flag: str, name: str, when: object, num_layers: int, with_embedding: bool) -> FrozenRange:
    where = f"{flag}: {name[:60]!r}"
    first, last = (-1, -1) if with_embedding and name.strip() == EMBEDDING else _layers_of(where, name, num_layers)
    start, end = _steps_of(where, when)
    if start < 0:
        raise ConfigError(f"{where}: expected a start of at least 0, got {start}")
    if end != _FOREVER and end <= start:
        raise ConfigError(f"{where}: expected an end after the start {start}, or -1 for never, got {end}")
    return FrozenRange(first_layer=first, last_layer=last, start=start, end=None if end == _FOREVER else end)


def _layers_of(where: str, name: str, num_layers: int) -> tuple[int, int]:
    match = _RANGE.fullmatch(name)
    if match is None:
        raise ConfigError(f"{where}: expected a layer or a range of layers such as 0-7")
    first = int(match.group(1))
    last = first if match.group(2) is None else int(match.group(2))
    if last < first:
        raise ConfigError(f"{where}: expected the first layer before the last")
    if last >= num_layers:
        raise ConfigError(f"{where}: layer {last} is unknown, the model has layers 0-{num_layers - 1}")
    return first, last


def _listed(when: object) -> list[object]:
    return when if isinstance(when, list) else [0, when]


def _steps_of(where: str, when: object) -> tuple[int, int]:
    steps = [int(step) if isinstance(step, float) and step.is_integer() else step for step in _listed(when)]
    match steps:
        case [int(start), int(end)] if not isinstance(start, bool) and not isinstance(end, bool):
            if max(start, end) > _MAX_STEP:
                raise ConfigError(f"{where}: expected steps of at most {_MAX_STEP}, got {json.dumps(when)[:60]}")
            return start, end
    raise ConfigError(f"{where}: expected [start, end] in whole steps, or the end alone, got {json.dumps(when)[:60]}")
