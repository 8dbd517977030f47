"""Routers that spread tokens evenly, as Megatron's TopKRouter with another assignment.

Each gives what Megatron's dispatchers expect: gates [tokens, experts], zero where nothing is routed, and a bool map of the
same shape. Logits, jitter and z-loss are Megatron's. Built through the layer's module spec (`specs`).
"""

import math
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, group_limited_topk, sinkhorn
from megatron.core.transformer.moe.router import TopKRouter

from megatron_dyn.dynamics.moe.auction import balanced_assignment
from megatron_dyn.dynamics.moe.meter import in_backward
from megatron_dyn.dynamics.moe.settings import Assignment
from megatron_dyn.ports import JobError


class AssigningRouter(TopKRouter):
    """What the routers here share: Megatron's way to the logits, an assignment of their own."""

    def assign(self, logits: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Gates and map, both [tokens, experts], for logits of that shape; `padding` is True for tokens that do not count."""
        raise NotImplementedError

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """See Megatron's TopKRouter.routing."""
        logits = logits.view(-1, self.config.num_moe_experts)
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        return self.assign(self.apply_z_loss(logits, padding_mask=padding), padding)


class SBaseRouter(AssigningRouter):
    """Balanced assignment while training, top-k of the gates in evaluation.

    BASE layers, Lewis et al. 2021, arXiv 2103.16716; with Sinkhorn: S-BASE in Clark et al. 2022, arXiv 2202.01169.
    """

    def __init__(self, *args: Any, assignment: Assignment, **options: Any) -> None:
        super().__init__(*args, **options)
        self._assignment = assignment

    def assign(self, logits: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See AssigningRouter. Raises JobError under padding: it would be balanced with the tokens."""
        _refuse_padding(padding, "s-base")
        # As with Megatron's sinkhorn: gates tell how well a pair fits, not which was chosen, so that one expert can learn too.
        gates = torch.sigmoid(logits) if self.topk == 1 else torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)
        with torch.no_grad():
            if not self.training:
                routed = _marked(gates, torch.topk(gates, self.topk, dim=1).indices)
            elif self._assignment is Assignment.AUCTION:
                routed = balanced_assignment(logits, self.topk)
            else:
                # Rows are scaled anyway; without their maxima the exponential of a great logit would be infinite.
                centred = torch.nan_to_num(logits.float() - logits.float().amax(dim=1, keepdim=True))
                routed = _marked(gates, torch.topk(sinkhorn(centred), self.topk, dim=1).indices)
        return gates * routed, routed


class LossFreeRouter(AssigningRouter):
    """Top-k of score plus bias; the gate is the score alone. The bias follows the loads (`update_bias`).

    Auxiliary-Loss-Free Load Balancing, Wang et al. 2024, arXiv 2408.15664, algorithm 1. The bias has the name that
    Megatron's own has, so Megatron keeps it in fp32 and saves it.
    """

    expert_bias: torch.Tensor
    step_tokens: torch.Tensor

    def __init__(self, *args: Any, rate: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rate = rate
        self.saved = True
        """Whether checkpoints know of the bias: False while one is loaded that was written without it."""
        num_experts = self.config.num_moe_experts
        # None as Megatron leaves it: no buffer can have the name until it is gone.
        del self.expert_bias
        self.register_buffer("expert_bias", torch.zeros(num_experts, dtype=torch.float32))
        self.register_buffer("step_tokens", torch.zeros(num_experts, dtype=torch.int64), persistent=False)

    def assign(self, logits: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See AssigningRouter."""
        config = self.config
        scores = self._scores(logits)
        with torch.no_grad():
            chosen = self._best(scores + self.expert_bias)
        if self.score_function == "softmax" and not config.moe_router_pre_softmax:
            gates = torch.softmax(logits.gather(1, chosen), dim=-1, dtype=torch.float32)
        else:
            gates = scores.gather(1, chosen)
            if self.score_function != "softmax" and self.topk > 1:
                gates = gates / (gates.sum(dim=-1, keepdim=True) + 1e-20)
        if config.moe_router_topk_scaling_factor:
            gates = gates * config.moe_router_topk_scaling_factor
        probs = torch.zeros_like(logits).scatter(1, chosen, gates.type_as(logits))
        routed = _marked(logits, chosen)
        self._count(routed, padding)
        if config.moe_expert_capacity_factor is None:
            return probs, routed
        return apply_router_token_dropping(
            probs,
            routed,
            router_topk=self.topk,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
            pad_to_capacity=config.moe_pad_expert_input_to_capacity,
        )

    def update_bias(self, tokens: torch.Tensor) -> None:
        """Move the bias by the rate towards the experts below the mean. `tokens` int64 [experts]: all of a global batch.

        To be called on every rank that has the layer, with the same counts: the sign is that of an integer, so that no
        order of summation can change it.
        """
        self._maintain_float32_expert_bias()
        self.expert_bias += self._rate * torch.sign(tokens.sum() - tokens * tokens.numel())

    def sharded_state_dict(self, prefix: str = "", *args: Any, **options: Any) -> dict[str, Any]:
        """See Megatron's MegatronModule."""
        entries: dict[str, Any] = super().sharded_state_dict(prefix, *args, **options)
        if not self.saved:
            del entries[f"{prefix}expert_bias"]
        return entries

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **options: Any) -> None:
        if not self.saved:
            # A checkpoint without it is complete all the same.
            state_dict.setdefault(f"{prefix}expert_bias", self.expert_bias)
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def _scores(self, logits: torch.Tensor) -> torch.Tensor:
        """What experts are compared by, fp32."""
        if self.score_function == "softmax":
            return torch.softmax(logits, dim=-1, dtype=torch.float32)
        if self.score_function == "sigmoid":
            return torch.sigmoid(logits.float())
        return torch.nn.functional.softplus(logits.float()).sqrt()

    def _best(self, scores: torch.Tensor) -> torch.Tensor:
        config = self.config
        if not config.moe_router_group_topk:
            return torch.topk(scores, self.topk, dim=1).indices
        num_tokens, num_experts = scores.shape
        return group_limited_topk(
            scores, self.topk, num_tokens, num_experts, config.moe_router_num_groups, config.moe_router_group_topk
        )[1]

    def _count(self, routed: torch.Tensor, padding: torch.Tensor | None) -> None:
        """Before anything is dropped: a capacity would hide by how much an expert is wanted too often."""
        if self.training and not in_backward():
            with torch.no_grad():
                self.step_tokens += (routed if padding is None else routed & ~padding[:, None]).sum(dim=0)


class ExpertChoiceRouter(AssigningRouter):
    """Each expert takes the tokens with its highest scores, as many as its capacity; a token may get any number of experts.

    Mixture-of-Experts with Expert Choice Routing, Zhou et al. 2022, arXiv 2202.09368. Which experts see a token depends
    on later tokens of the batch, in evaluation too: a language model trained so sees a little of the future.
    """

    def __init__(self, *args: Any, capacity_factor: float, **options: Any) -> None:
        super().__init__(*args, **options)
        self._capacity_factor = capacity_factor

    def assign(self, logits: torch.Tensor, padding: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See AssigningRouter. Raises JobError under padding: experts would take it for tokens."""
        _refuse_padding(padding, "expert-choice")
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        num_tokens, num_experts = logits.shape
        capacity = min(num_tokens, math.ceil(self._capacity_factor * num_tokens * self.topk / num_experts))
        with torch.no_grad():
            taken = torch.topk(scores, capacity, dim=0).indices
            routed = torch.zeros_like(logits, dtype=torch.bool).scatter(0, taken, True)
        return (scores * routed).type_as(logits), routed


def _marked(like: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The bool map of chosen experts [tokens, topk]."""
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, chosen, True)


def _refuse_padding(padding: torch.Tensor | None, routing: str) -> None:
    if padding is not None:
        raise JobError(f"--dyn-moe-routing {routing}: expected sequences without padding, got a padding mask")
