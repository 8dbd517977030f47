"""An entry whose model has frozen layers, as a user's own model would: frozen when it is built, before Megatron wraps it."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from megatron_dyn.host.seams import apply
from tests.distributed.plugin_run import row, train_and_dump


def train_with_frozen_layers(argv: Sequence[str], layers: Sequence[int]) -> dict[str, Any]:
    """Train with the embedding and `layers` frozen; describe the rank's state and what its optimizer holds."""
    found: dict[str, Any] = {}

    def freezing(original: Callable[..., None]) -> Callable[..., None]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if self.pre_process:
                self.embedding.requires_grad_(False)
            for layer in self.decoder.layers:
                if layer.layer_number - 1 in layers:
                    layer.requires_grad_(False)

        return init

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(forward_step, model, optimizer, *args, **kwargs)
            found["groups"] = [
                [{key: group[key] for key in ("wd_mult", "is_expert_parallel")} for group in wrapper.optimizer.param_groups]
                for wrapper in getattr(optimizer, "chained_optimizers", [optimizer])
            ]
            found["num_trained"] = sum(len(group["params"]) for group in optimizer.param_groups)
            return result

        return train

    importlib.import_module("megatron.training.training")
    rows = [
        row("megatron.core.models.gpt.gpt_model:GPTModel.__init__", freezing),
        row("megatron.training.training:train", looking),
    ]
    with apply(rows):
        return train_and_dump(argv) | found
