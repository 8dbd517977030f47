"""Counts what a layer's router gives to its experts, without waiting for the device.

Hooks on the router and on the experts; sums stay in a buffer of the layer, so that they move with it. Knows nothing of steps
and of other ranks.
"""

from collections.abc import Mapping
from typing import Any

import torch


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a forward that runs there recomputes one that was counted."""
    return torch._C._current_graph_task_id() != -1


class LoadMeter(torch.nn.Module):
    """One per layer with experts, a child of its `mlp`. Only training forwards count, each once."""

    counts: torch.Tensor
    """Int64 [experts + 2]: routed tokens by expert, (token, expert) pairs expected, tokens that no expert got."""
    rows: torch.Tensor
    """Int64 [micro-batches of an interval]: rows that the experts of this rank computed."""

    def __init__(self, *, num_experts: int, topk: int, padded: bool, num_microbatches: int) -> None:
        """`padded`: the router fills experts up to their capacity with tokens that count nothing (their gate is 0).

        `num_microbatches` are those of the longest interval.
        """
        super().__init__()
        self._num_experts, self._topk, self._padded = num_experts, topk, padded
        self._next = 0
        # Not saved: at a resume a new interval begins.
        self.register_buffer("counts", torch.zeros(num_experts + 2, dtype=torch.int64), persistent=False)
        self.register_buffer("rows", torch.zeros(num_microbatches, dtype=torch.int64), persistent=False)

    def watch(self, mlp: torch.nn.Module) -> None:
        """Become a child of a MoE layer and count what its router and its experts get."""
        mlp.add_module("dyn_loads", self)
        mlp.router.register_forward_hook(self._routed, with_kwargs=True)
        mlp.experts.register_forward_pre_hook(self._computed)

    def clear(self) -> None:
        """Begin a new interval."""
        self.counts.zero_()
        self.rows.zero_()

    def seek(self, microbatch: int) -> None:
        """The next micro-batch is this one of the interval; to be told at every step, since a layer may just have arrived."""
        self._next = microbatch

    def _routed(self, router: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any) -> None:
        if not router.training or in_backward():
            return
        probs, routed = output
        padding = kwargs.get("padding_mask", args[1] if len(args) > 1 else None)
        with torch.no_grad():
            if self._padded:
                routed = routed & (probs != 0)
            none = ~routed.any(dim=1)
            num_tokens: Any = routed.shape[0]
            if padding is not None:
                valid = ~padding.reshape(-1)
                routed, none, num_tokens = routed & valid[:, None], none & valid, valid.sum()
            self.counts[: self._num_experts] += routed.sum(dim=0)
            self.counts[self._num_experts] += num_tokens * self._topk
            self.counts[self._num_experts + 1] += none.sum()

    def _computed(self, experts: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if experts.training and not in_backward():
            self.rows[self._next] = args[0].shape[0]
            self._next += 1
