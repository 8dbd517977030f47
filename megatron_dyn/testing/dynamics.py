"""Stand-ins for a dynamic family and for the job it works on, in one process: no Megatron, no optimizer.

They keep the contracts of `ports.Dynamic` and `ports.Job`; shipped, so that families built on the plugin can be tested.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_dyn.ports import Change, Dynamic, Job


class FakeJob:
    """Implements ports.Job for a job of one rank, around plain modules that stand for decoder layers."""

    def __init__(
        self, layers: Mapping[int, torch.nn.Module], *, args: object = None, embedding: torch.nn.Module | None = None
    ) -> None:
        """`layers` by global id."""
        self._args, self._embedding, self._layers = args, embedding, dict(layers)
        self.rate = 1e-3
        self.frozen: list[tuple[frozenset[int], bool, bool]] = []
        """What `set_trainable` was told, call by call: layers, embedding, park."""

    @property
    def args(self) -> Any:  # noqa: ANN401 - Megatron has no type for it
        """See ports.Job."""
        return self._args

    @property
    def layers(self) -> Mapping[int, torch.nn.Module]:
        """See ports.Job."""
        return self._layers

    @property
    def embedding(self) -> torch.nn.Module | None:
        """See ports.Job."""
        return self._embedding

    @property
    def learning_rate(self) -> float:
        """See ports.Job."""
        return self.rate

    def gather(self, value: object, what: str) -> list[Any]:
        """See ports.Job."""
        return [value]

    def sum_counts(self, counts: torch.Tensor, what: str) -> torch.Tensor:
        """See ports.Job."""
        return counts.clone()

    def counts_here(self, parameter: torch.Tensor) -> bool:
        """See ports.Job."""
        return True

    def gradient_norms(self) -> Sequence[float]:
        """See ports.Job; of `main_grad` where a parameter has one, else of `grad`."""
        norms = []
        for _, module in sorted(self.layers.items()):
            grads = [getattr(p, "main_grad", p.grad) for p in module.parameters() if p.requires_grad]
            norms.append(float(sum(float(grad.double().square().sum()) for grad in grads if grad is not None)) ** 0.5)
        return norms

    def settle_parameters(self) -> None:
        """See ports.Job; parameters are never gathered here."""

    def silence(self, masks: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """See ports.Job; there are no main parameters and moments here."""
        with torch.no_grad():
            for parameter, mask in masks.items():
                parameter.mul_(mask)

    def set_trainable(self, frozen_layers: frozenset[int], *, embedding_frozen: bool, park: bool) -> None:
        """See ports.Job."""
        self.frozen.append((frozen_layers, embedding_frozen, park))
        for layer, module in self.layers.items():
            module.requires_grad_(layer not in frozen_layers)


class RecordingDynamic(Dynamic):
    """Writes down what it is called with, and announces the changes it was given."""

    name = "recording"

    def __init__(self, changes: Mapping[int, Change] | None = None, *, keeps_layers_apart: bool = False) -> None:
        """`changes` by the finished iterations at which they are announced."""
        self._changes = dict(changes or {})
        self.keeps_layers_apart = keeps_layers_apart
        self.calls: list[tuple[Any, ...]] = []

    def check(self, args: object, others: Sequence[str]) -> None:
        """See ports.Dynamic."""
        self.calls.append(("check", tuple(others)))

    def layer_spec(self, layer: int, spec: object) -> object:
        """See ports.Dynamic."""
        self.calls.append(("layer_spec", layer))
        return spec

    def attach(self, layer: int, module: object) -> None:
        """See ports.Dynamic."""
        self.calls.append(("attach", layer))

    def begin(self, job: Job, step: int, state: object) -> None:
        """See ports.Dynamic."""
        self.calls.append(("begin", step, state))

    def start(self, step: int) -> None:
        """See ports.Dynamic."""
        self.calls.append(("start", step))

    def before_step(self, step: int) -> None:
        """See ports.Dynamic."""
        self.calls.append(("before_step", step))

    def after_gradients(self, step: int) -> None:
        """See ports.Dynamic."""
        self.calls.append(("after_gradients", step))

    def at_boundary(self, step: int) -> Sequence[Change]:
        """See ports.Dynamic."""
        self.calls.append(("at_boundary", step))
        return [self._changes[step]] if step in self._changes else []

    def cost_changes(self) -> tuple[int, ...]:
        """See ports.Dynamic."""
        return tuple(sorted(self._changes))

    def state(self) -> int:
        """See ports.Dynamic."""
        return len(self.calls)

    def notes(self, layer: int) -> Mapping[str, Any]:
        """See ports.Dynamic."""
        return {"layer": layer}
