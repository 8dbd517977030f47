"""Layer specifications for `--spec MODULE NAME`: Megatron's own local one, and one whose layers hold state of every kind."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

WEIGHT_OF_MEAN = 0.01


class RememberingNorm(torch.nn.LayerNorm):
    """A norm that shifts its output by the mean of all inputs it has seen in training.

    The mean is a buffer and the number of inputs extra state: a layer that lost either would compute something else.
    """

    running_mean: torch.Tensor

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        self.register_buffer("running_mean", torch.zeros(hidden_size))
        self.num_seen = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.num_seen += 1
            mean = inputs.detach().mean(dim=(0, 1)).to(self.running_mean.dtype)
            self.running_mean.lerp_(mean, 1 / self.num_seen)
        return super().forward(inputs) + WEIGHT_OF_MEAN * self.running_mean.to(inputs.dtype)

    def get_extra_state(self) -> dict[str, int]:
        """See torch.nn.Module."""
        return {"num_seen": self.num_seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        """See torch.nn.Module."""
        self.num_seen = state["num_seen"]


plain_layer = get_gpt_layer_local_spec()

remembering_layer = get_gpt_layer_local_spec()
remembering_layer.submodules.input_layernorm = RememberingNorm
