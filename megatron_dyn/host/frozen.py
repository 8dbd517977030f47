"""No backward where nothing trains before: how the schedule learns of a frozen prefix (the embedding and the first layers).

Megatron asks every stage for the gradient of its input. A stage with only frozen pieces before it does not compute one: its
input takes no gradient, and what it sends back is a tensor of zeros of the right shape, so that nobody waits in vain.
"""

import inspect
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

import torch

from megatron_dyn.host.chunk import ModelChunk
from megatron_dyn.host.layout import layer_offset
from megatron_dyn.host.seams import Seam
from megatron_dyn.host.stage import StageModel

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def prefix_length(frozen_layers: Collection[int], *, embedding_frozen: bool) -> int:
    """Layers that need no backward at all: all before the first that trains, where the embedding does not train either."""
    count = 0
    while embedding_frozen and count in frozen_layers:
        count += 1
    return count


class FrozenPrefix:
    """One per rank. `rows` are in force from the start; until `watch` and `freeze` they change nothing."""

    def __init__(self) -> None:
        """Nothing is frozen."""
        self._stage: StageModel | None = None
        self._num_layers = 0
        self._embedding = False

    def watch(self, stage: StageModel) -> None:
        """Work on the chunks of `stage`; detaches what its embedding gives while that is frozen."""
        self._stage = stage
        for chunk in stage.chunks:
            if chunk.has_embedding:
                chunk.model.embedding.register_forward_hook(self._detach(chunk))

    def freeze(self, frozen_layers: frozenset[int], *, embedding_frozen: bool) -> None:
        """What is frozen from the next step on. Layers count from the first; none of them without the embedding."""
        self._embedding = embedding_frozen
        self._num_layers = prefix_length(frozen_layers, embedding_frozen=embedding_frozen)

    def rows(self) -> tuple[Seam, ...]:
        """The ledger rows."""
        return (
            Seam(
                target=f"{_SCHEDULES}:forward_step",
                why="what is received requires a gradient, even if nothing before this stage trains",
                remove_when="the schedule asks a stage whether anything before it trains",
                parameters=("model", "input_tensor"),
                wrap=self._around_forward,
            ),
            Seam(
                target=f"{_SCHEDULES}:backward_step",
                why="it asks for the gradient of an input that has none, and the stage before waits for a tensor",
                remove_when="backward_step gives back zeros for an input that takes no gradient",
                parameters=("input_tensor", "output_tensor", "output_tensor_grad"),
                wrap=_around_backward,
            ),
        )

    def _chunk_of(self, model: Any) -> ModelChunk | None:
        chunks = [] if self._stage is None else self._stage.chunks
        return next((chunk for chunk in chunks if chunk.ddp is model), None)

    def _takes_no_gradient(self, chunk: ModelChunk) -> bool:
        """Whether the input of a chunk needs no gradient."""
        first = layer_offset(chunk.config, getattr(chunk.block, "vp_stage", None))
        if not self._embedding or self._num_layers < first:
            return False
        # Megatron's full recomputation drops the gradients of weights, too, where the input takes none.
        return not (_recomputes_fully(chunk) and self._num_layers < first + len(chunk.block.layers))

    def _detach(self, chunk: ModelChunk) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
            if not self._embedding or not torch.is_grad_enabled():
                return None
            return output.detach().requires_grad_(not self._takes_no_gradient(chunk))

        return hook

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            chunk = self._chunk_of(given["model"])
            if chunk is not None and self._takes_no_gradient(chunk):
                for tensor in _listed(given["input_tensor"]):
                    if tensor is not None:
                        tensor.requires_grad_(False)
            return original(*args, **kwargs)

        return forward_step


def _around_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def backward_step(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = bound.arguments["input_tensor"]
        idle = [tensor is not None and not tensor.requires_grad for tensor in _listed(given)]
        if not any(idle):
            return original(*args, **kwargs)
        shown = [None if skip else tensor for skip, tensor in zip(idle, _listed(given), strict=True)]
        bound.arguments["input_tensor"] = shown if isinstance(given, list) else shown[0]
        found = _listed(original(*bound.args, **bound.kwargs))
        grads = [
            torch.zeros_like(tensor) if skip else grad for skip, tensor, grad in zip(idle, _listed(given), found, strict=True)
        ]
        return grads if isinstance(given, list) else grads[0]

    return backward_step


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _recomputes_fully(chunk: ModelChunk) -> bool:
    return getattr(chunk.config, "recompute_granularity", None) == "full"
