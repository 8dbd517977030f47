"""A gradient norm that does not depend on how layers are spread over stages (`--dyn-exact-grad-norm`).

Megatron sums squares per stage and then over stages, so the last bits of the norm, and through clipping of every
parameter, depend on the layout. Here every parameter's squares are summed in fp64 by themselves, all ranks get all those
sums, and `math.fsum` adds them: it rounds once, at the end, so no order of layers, stages or ranks can change the result.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import clip_grads

from megatron_dyn.host.seams import Seam

_CHUNK = 1 << 24
"""Elements whose squares are summed at a time."""


def seam() -> Seam:
    """The ledger row that swaps the norm in."""
    return Seam(
        target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
        why="Megatron's sum order follows the layout; a move would change the last bits of the clip factor",
        remove_when="Megatron's norm is independent of the pipeline layout",
        parameters=("grads_for_norm", "norm_type", "grad_stats_parallel_group"),
        wrap=_wrap_grad_norm,
    )


def exact_norm(squares: Sequence[float]) -> float:
    """The 2-norm from sums of squares, rounded to fp32 once; independent of the order of `squares`."""
    return float(torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float32))


def _wrap_grad_norm(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_grad_norm_fp32(
        grads_for_norm: list[torch.Tensor] | torch.Tensor,
        norm_type: int | float = 2,
        grad_stats_parallel_group: dist.ProcessGroup | None = None,
    ) -> float | torch.Tensor:
        if float(norm_type) != 2.0:
            return original(grads_for_norm, norm_type, grad_stats_parallel_group)
        grads = [grads_for_norm] if isinstance(grads_for_norm, torch.Tensor) else list(grads_for_norm)
        norm = exact_norm(_gather_squares(grads, grad_stats_parallel_group))
        if clip_grads.multi_tensor_scale_tensor_impl is not None:
            # With Transformer Engine the caller expects a tensor, as from the original.
            return torch.tensor([norm], dtype=torch.float32, device=torch.cuda.current_device())
        return norm

    return get_grad_norm_fp32


def _gather_squares(grads: Sequence[torch.Tensor], group: dist.ProcessGroup | None) -> list[float]:
    """Every rank's sums of squares, per parameter (and chunk). All ranks of `group` must call."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    # In chunks of a fixed size, so that the fp64 copy stays small; they depend on the parameter alone, not on its place.
    chunks = [chunk for grad in grads for chunk in grad.detach().reshape(-1).split(_CHUNK)]
    squares = [chunk.double().square().sum() for chunk in chunks]
    mine = torch.stack(squares).to(device) if squares else torch.zeros(0, dtype=torch.float64, device=device)
    num_ranks = dist.get_world_size(group)
    counts = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(num_ranks)]
    dist.all_gather(counts, torch.tensor([len(squares)], dtype=torch.int64, device=device), group=group)
    longest = max(int(count) for count in counts)
    padded = torch.zeros(longest, dtype=torch.float64, device=device)
    padded[: len(squares)] = mine
    rows = [torch.zeros_like(padded) for _ in range(num_ranks)]
    dist.all_gather(rows, padded, group=group)
    return torch.cat(rows).tolist()
