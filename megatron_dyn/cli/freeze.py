"""What freezing layers does to their costs, and the schedule of a dry run: pure. It must not know how a model is frozen."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_dyn.cli.document import parse_json
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule
from megatron_dyn.records import Cost

_FLAG = "--freeze-schedule"


def parse_schedule(text: str, *, num_layers: int) -> FreezeSchedule:
    """Read the JSON text of a schedule; raises ConfigError that names the range, what was expected and what was found."""
    return FreezeSchedule.of_table(parse_json(text, _FLAG).data, flag=_FLAG, num_layers=num_layers, shown=text)


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


def unit_layers(num_layers: int) -> tuple[Cost, ...]:
    """Layers of one unit of forward and two of backward, half of it for weight gradients."""
    return (Cost(forward_seconds=1.0, backward_seconds=2.0, backward_weight_seconds=1.0),) * num_layers
