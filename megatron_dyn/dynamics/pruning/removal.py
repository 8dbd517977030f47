"""One pruning step on the whole model: how many weights stay, which, and the others cleared with all that belongs to them."""

from collections.abc import Sequence
from functools import partial

import torch

from megatron_dyn.dynamics.pruning.settings import PruneSettings, Scope
from megatron_dyn.dynamics.pruning.threshold import Choice, Shard, choose
from megatron_dyn.dynamics.pruning.units import mask_of, units_of
from megatron_dyn.dynamics.pruning.weights import Weight
from megatron_dyn.ports import Job


def prune_to(level: float, weights: Sequence[Weight], job: Job, settings: PruneSettings) -> Choice:
    """Hide the share `level` of the weights that train now, the smallest of each scope; what is hidden stays hidden.

    `weights` are the local ones. Their masks, values, main parameters and moments change in place. All ranks must call, at a
    step boundary.
    """
    # With overlapped gathers a rank would take for weights what they were before the optimizer's step.
    job.settle_parameters()
    pattern = settings.pattern
    shards = {weight: _shard(weight, job, settings) for weight in weights if weight.parameter.requires_grad}
    num_scopes = job.args.num_layers if settings.scope is Scope.LAYER else 1
    choice = choose(list(shards.values()), _budgets(level, shards, num_scopes, job), job.sum_counts, job.gather)
    masks = {
        weight.parameter: mask_of(choice.kept[shard.key], weight.parameter, weight.mask, pattern)
        for weight, shard in shards.items()
    }
    job.silence(masks)
    for weight in shards:
        weight.mask.copy_(masks[weight.parameter])
    return choice


def _shard(weight: Weight, job: Job, settings: PruneSettings) -> Shard:
    return Shard(
        weight.key,
        partial(units_of, weight.parameter, weight.mask, settings.pattern),
        weight.layer if settings.scope is Scope.LAYER else 0,
        job.counts_here(weight.parameter),
    )


def _budgets(level: float, shards: dict[Weight, Shard], num_scopes: int, job: Job) -> list[int]:
    """How many of the weights that the pattern could prune stay, by scope."""
    sizes = torch.zeros(num_scopes, 2, dtype=torch.int64)
    for weight, shard in shards.items():
        if shard.speaks:
            sizes[shard.scope] += torch.tensor([weight.mask.numel(), shard.units().num_weights])
    totals = job.sum_counts(sizes, "sizes of weights").tolist()
    return [max(0, could_go - round(level * num_weights)) for num_weights, could_go in totals]
