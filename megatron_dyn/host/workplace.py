"""What the rounds and the dynamic families work on together: one model, one optimizer, one group for small messages."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dyn.host.collective import GlooCollective
from megatron_dyn.host.editors import Editor, editor_of
from megatron_dyn.host.stage import StageModel, share_specs


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """One per rank and job."""

    args: Any
    """Megatron's."""
    stage: StageModel
    editor: Editor
    optimizer: Any
    collective: GlooCollective


class Opening:
    """Makes the Workplace once, for whoever asks first."""

    def __init__(self, args: Any, *, timeout_seconds: float, dress: Callable[[int, torch.nn.Module], None] | None) -> None:
        """`dress(layer, module)` is applied to every layer that is built here later on."""
        self._args, self._timeout_seconds, self._dress = args, timeout_seconds, dress
        self._made: Workplace | None = None

    def __call__(self, model: list[Any], optimizer: Any) -> Workplace:
        """The workplace around this model and optimizer. All ranks together: it makes the one group the plugin owns."""
        if self._made is None or self._made.optimizer is not optimizer:
            stage = StageModel(model, dress=self._dress)
            collective = GlooCollective(timeout_seconds=self._timeout_seconds)
            share_specs(stage, collective)
            self._made = Workplace(
                args=self._args, stage=stage, editor=editor_of(optimizer), optimizer=optimizer, collective=collective
            )
        return self._made
