"""The control plane on torch.distributed: small objects over a gloo group of its own, with its own timeout."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_dyn.ports import CollectiveTimeout, JobError


class GlooCollective:
    """Implements ports.Collective. One per training loop: it owns one process group, made once and kept."""

    def __init__(self, *, timeout_seconds: float) -> None:
        """All ranks must construct it together, after the default group exists."""
        self._timeout_seconds = timeout_seconds
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))

    @property
    def rank(self) -> int:
        """See ports.Collective."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """See ports.Collective."""
        return dist.get_world_size()

    def gather(self, value: Any, what: str) -> list[Any]:
        """See ports.Collective."""
        values: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(values, (what, value), group=self.group)
        except RuntimeError as error:
            raise self._gone(what, error) from error
        meetings = sorted({meeting for meeting, _ in values})
        if meetings != [what]:
            # Ranks decided differently: what they sent must not be taken for answers to each other.
            raise JobError(f"rank {self.rank}: ranks are at different points of a round: {'; '.join(meetings)}")
        return [value for _, value in values]

    def sum_counts(self, counts: torch.Tensor, what: str) -> torch.Tensor:
        """The elementwise sum of an int64 CPU tensor over all ranks; all must call with the same shape and `what`."""
        total = counts.clone()
        try:
            dist.all_reduce(total, group=self.group)
        except RuntimeError as error:
            raise self._gone(what, error) from error
        return total

    def _gone(self, what: str, error: Exception) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"rank {self.rank}: {what}: a rank did not answer within {self._timeout_seconds:g} s or is gone: {error}"
        )
