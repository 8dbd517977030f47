"""Implements ports.Job: what a dynamic family may ask of Megatron's model and optimizer."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_dyn.host.bare_ranks import BareRanks
from megatron_dyn.host.frozen import FrozenPrefix
from megatron_dyn.host.gradients import layer_norms
from megatron_dyn.host.optimizer import is_expert
from megatron_dyn.host.refit import Refitter
from megatron_dyn.host.workplace import Workplace
from megatron_dyn.ports import JobError


class MegatronJob:
    """One per rank."""

    def __init__(self, workplace: Workplace, prefix: FrozenPrefix | None = None, bare: BareRanks | None = None) -> None:
        """Bound to the job's own model and optimizer. `prefix` is what the schedule asks, `bare` what checkpoints ask, where a
        family freezes.

        All ranks must construct it where a family freezes.
        """
        self._workplace, self._prefix = workplace, prefix
        self._refitter = None if prefix is None else Refitter(workplace)
        if prefix is not None:
            prefix.watch(workplace.stage)
        if bare is not None and self._refitter is not None:
            bare.watch(self._refitter.count_steps)

    @property
    def args(self) -> Any:
        """See ports.Job."""
        return self._workplace.args

    @property
    def layers(self) -> Mapping[int, torch.nn.Module]:
        """See ports.Job."""
        return self._workplace.stage.layers

    @property
    def embedding(self) -> torch.nn.Module | None:
        """See ports.Job."""
        chunk = next((chunk for chunk in self._workplace.stage.chunks if chunk.has_embedding), None)
        return None if chunk is None else chunk.model.embedding

    @property
    def learning_rate(self) -> float:
        """See ports.Job."""
        return max(float(group["lr"]) for group in self._workplace.optimizer.param_groups)

    def gather(self, value: Any, what: str) -> list[Any]:
        """See ports.Job."""
        return self._workplace.collective.gather(value, what)

    def sum_counts(self, counts: torch.Tensor, what: str) -> torch.Tensor:
        """See ports.Job."""
        return self._workplace.collective.sum_counts(counts, what)

    def counts_here(self, parameter: torch.Tensor) -> bool:
        """See ports.Job."""
        if is_expert(parameter):
            return int(parallel_state.get_expert_data_parallel_rank()) == 0
        if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
            return False
        cut = getattr(parameter, "tensor_model_parallel", False)
        return bool(cut) or parallel_state.get_tensor_model_parallel_rank() == 0

    def gradient_norms(self) -> Sequence[float]:
        """See ports.Job."""
        return layer_norms(self._workplace, self.counts_here)

    def settle_parameters(self) -> None:
        """See ports.Job."""
        for chunk in self._workplace.stage.chunks:
            chunk.sync_parameters()

    def silence(self, masks: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """See ports.Job."""
        with torch.no_grad():
            for parameter, mask in masks.items():
                parameter.data.mul_(mask)
            self._workplace.editor.silence(masks)

    def set_trainable(self, frozen_layers: frozenset[int], *, embedding_frozen: bool, park: bool) -> None:
        """See ports.Job."""
        if self._refitter is None or self._prefix is None:
            raise JobError("a family that freezes has to say so: Dynamic.freezes")
        self._refitter.set_trainable(frozen_layers, embedding_frozen=embedding_frozen, park=park)
        self._prefix.freeze(frozen_layers, embedding_frozen=embedding_frozen)
