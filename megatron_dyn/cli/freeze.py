"""What freezing layers does to their costs, and schedules of freezing: pure. Used by the dry run and by the generators.

A schedule step is a number of finished iterations, as in classic NeMo: `[10, 100]` freezes a range from iteration 11 to
iteration 100, ends exclusive. It must not know how a model is frozen.
"""

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_dyn.cli.document import parse_json
from megatron_dyn.cli.errors import InputError
from megatron_dyn.records import Cost

_RANGE = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", re.ASCII)
_MAX_STEP = 1_000_000_000
"""Steps beyond any run: a number of thousands of digits could not even be printed."""
_FOREVER = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenRange:
    """Layers that are frozen together, and when."""

    first_layer: int
    last_layer: int
    """Inclusive."""
    start: int
    """Iterations that are finished when the layers freeze; 0: before the first."""
    end: int | None
    """Iterations that are finished when they train again (exclusive); None: never."""


@dataclass(frozen=True, slots=True)
class FreezeSchedule:
    """Which layers are frozen when. Ranges may overlap: a layer is frozen while any of its ranges says so."""

    ranges: tuple[FrozenRange, ...]

    @classmethod
    def parse(cls, text: str, *, num_layers: int) -> "FreezeSchedule":
        """Read `{"0-7": [0, 200], "8-15": [50, -1], "16": 100}`: layers, then start and end, or the end alone.

        An end of -1 is never. Raises InputError that names the range, what was expected and what was found.
        """
        table = parse_json(text, "--freeze-schedule").data
        if not isinstance(table, dict) or not table:
            raise InputError(f'--freeze-schedule: expected an object such as {{"0-7": [0, 200]}}, got {text.strip()[:60]!r}')
        return cls(tuple(_range_of(name, when, num_layers) for name, when in table.items()))

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps at which layers freeze or train again, ascending; some may change nothing where ranges overlap."""
        return tuple(sorted({step for item in self.ranges for step in (item.start, item.end) if step is not None}))

    def frozen(self, step: int) -> frozenset[int]:
        """Ids of the layers that are frozen in the iteration after `step` finished ones."""
        return frozenset(
            layer
            for item in self.ranges
            if item.start <= step and (item.end is None or step < item.end)
            for layer in range(item.first_layer, item.last_layer + 1)
        )


def frozen_costs(layers: Sequence[Cost], frozen: Collection[int], *, trains_before: bool = False) -> tuple[Cost, ...]:
    """The costs of `layers`, given as if all trained, when the layers with ids in `frozen` do not.

    A frozen layer computes no weight gradients and takes no optimizer step. It still hands the gradient of its input
    back if anything before it trains: a layer, or with `trains_before` the embedding. The frozen layers before the first
    piece that trains compute no backward at all. Where a cost does not tell its weight gradients apart they are half of
    the backward. Bytes stay as they are: what was allocated for a layer is not given back without a rebuild, and its
    micro-batches are in flight all the same.
    """
    costs = []
    for layer, cost in enumerate(layers):
        if layer not in frozen:
            trains_before = True
            costs.append(cost)
            continue
        weight = cost.backward_weight_seconds or cost.backward_seconds / 2
        backward = cost.backward_seconds - weight if trains_before else 0.0
        costs.append(replace(cost, backward_seconds=backward, backward_weight_seconds=0.0, optimizer_seconds=0.0))
    return tuple(costs)


def _range_of(name: str, when: object, num_layers: int) -> FrozenRange:
    where = f"--freeze-schedule: {name[:60]!r}"
    match = _RANGE.fullmatch(name)
    if match is None:
        raise InputError(f"{where}: expected a layer or a range of layers such as 0-7")
    first = int(match.group(1))
    last = first if match.group(2) is None else int(match.group(2))
    if last < first:
        raise InputError(f"{where}: expected the first layer before the last")
    if last >= num_layers:
        raise InputError(f"{where}: layer {last} is unknown, the model has layers 0-{num_layers - 1}")
    start, end = _steps_of(where, when)
    if start < 0:
        raise InputError(f"{where}: expected a start of at least 0, got {start}")
    if end != _FOREVER and end <= start:
        raise InputError(f"{where}: expected an end after the start {start}, or -1 for never, got {end}")
    return FrozenRange(first_layer=first, last_layer=last, start=start, end=None if end == _FOREVER else end)


def _listed(when: object) -> list[object]:
    return when if isinstance(when, list) else [0, when]


def _steps_of(where: str, when: object) -> tuple[int, int]:
    steps = [int(step) if isinstance(step, float) and step.is_integer() else step for step in _listed(when)]
    match steps:
        case [int(start), int(end)] if not isinstance(start, bool) and not isinstance(end, bool):
            if max(start, end) > _MAX_STEP:
                raise InputError(f"{where}: expected steps of at most {_MAX_STEP}, got {json.dumps(when)[:60]}")
            return start, end
    raise InputError(f"{where}: expected [start, end] in whole steps, or the end alone, got {json.dumps(when)[:60]}")


def unit_layers(num_layers: int) -> tuple[Cost, ...]:
    """Layers of one unit of forward and two of backward, half of it for weight gradients."""
    return (Cost(forward_seconds=1.0, backward_seconds=2.0, backward_weight_seconds=1.0),) * num_layers
