"""The gradient norm of every decoder layer, exact: it depends neither on where layers lie nor on how gradients are sharded."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn.host.grad_norm import exact_norm, exponent_of, sum_squares
from megatron_dyn.host.optimizer import is_expert
from megatron_dyn.host.sharded import ShardEditor
from megatron_dyn.host.workplace import Workplace


def layer_norms(workplace: Workplace, counts_here: Callable[[torch.Tensor], bool]) -> Sequence[float]:
    """2-norm of the reduced gradient of each decoder layer, by global id. All ranks must call.

    In units of the loss: the loss scale of fp16 is taken out. Infinite or not a number where the gradient is.
    """
    ranges = workplace.editor.ranges() if isinstance(workplace.editor, ShardEditor) else None
    grads = {layer: list(_owned(module, ranges, counts_here)) for layer, module in workplace.stage.layers.items()}
    exponents = _merged(workplace, {layer: exponent_of(own) for layer, own in grads.items()}, max, "exponents of gradients")
    infinite = {layer for layer, exponent in exponents.items() if exact_norm(0, exponent) != 0.0}
    sums = {layer: sum_squares(own, exponents[layer]) if own and layer not in infinite else 0 for layer, own in grads.items()}
    totals = _merged(workplace, sums, int.__add__, "squares of gradients")
    scale = float(workplace.optimizer.get_loss_scale().item())
    return [exact_norm(totals[layer], exponents[layer]) / scale for layer in sorted(totals)]


def _owned(
    module: torch.nn.Module,
    ranges: dict[torch.Tensor, tuple[int, int]] | None,
    counts_here: Callable[[torch.Tensor], bool],
) -> Iterator[torch.Tensor]:
    """The gradients of a layer that this rank speaks for, each element on one rank of the job only."""
    for parameter in module.parameters():
        grad = getattr(parameter, "main_grad", None)
        if not parameter.requires_grad or grad is None:
            continue
        if ranges is None:
            if counts_here(parameter):
                yield grad
        elif parameter in ranges and _speaks_for_shards(parameter):
            start, end = ranges[parameter]
            yield grad.view(-1)[start:end]


def _speaks_for_shards(parameter: torch.Tensor) -> bool:
    """Whether this rank counts among those that hold the same shard: slices of it lie on the ranks of one instance."""
    if parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False) is not None:
        group = parallel_state.get_inter_distributed_optimizer_instance_group()
        if dist.get_rank(group) != 0:
            return False
    cut = getattr(parameter, "tensor_model_parallel", False)
    return is_expert(parameter) or bool(cut) or parallel_state.get_tensor_model_parallel_rank() == 0


def _merged(workplace: Workplace, mine: dict[int, int], join: Callable[[int, int], int], what: str) -> dict[int, int]:
    merged: dict[int, int] = {}
    for theirs in workplace.collective.gather(mine, what):
        for layer, value in theirs.items():
            merged[layer] = join(merged[layer], value) if layer in merged else value
    return merged
