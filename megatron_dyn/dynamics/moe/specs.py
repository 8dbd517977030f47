"""Puts another router into the module spec of a layer, and readies the dispatcher for it."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_dyn.dynamics.moe.routers import ExpertChoiceRouter, LossFreeRouter, SBaseRouter
from megatron_dyn.dynamics.moe.settings import MoeSettings, Routing


def router_of(settings: MoeSettings) -> Callable[..., Any] | None:
    """What builds the router, called as Megatron calls its own; None: Megatron's. Picklable, for specs travel."""
    match settings.routing:
        case Routing.S_BASE:
            return partial(SBaseRouter, assignment=settings.assignment)
        case Routing.LOSS_FREE:
            return partial(LossFreeRouter, rate=settings.bias_rate)
        case Routing.EXPERT_CHOICE:
            return partial(ExpertChoiceRouter, capacity_factor=settings.capacity_factor)
    return None


def with_router(spec: ModuleSpec, router: Callable[..., Any]) -> ModuleSpec:
    """The spec of a decoder layer with another router; a layer without experts stays as it is."""
    mlp = getattr(spec.submodules, "mlp", None)
    if isinstance(mlp, partial) and isinstance(experts := mlp.keywords.get("submodules"), MoESubmodules):
        changed: Any = partial(mlp.func, *mlp.args, **{**mlp.keywords, "submodules": replace(experts, router=router)})
    elif isinstance(mlp, ModuleSpec) and isinstance(mlp.submodules, MoESubmodules):
        # megatron-core 0.17
        changed = replace(mlp, submodules=replace(mlp.submodules, router=router))
    else:
        return spec
    return replace(spec, submodules=replace(spec.submodules, mlp=changed))


def has_experts(module: torch.nn.Module) -> bool:
    """Whether a decoder layer is one with experts."""
    return hasattr(getattr(module, "mlp", None), "router")


def let_counts_vary(mlp: torch.nn.Module) -> None:
    """Make the dispatcher of a MoE layer count the pairs that are routed, where it would take them to be tokens x top-k.

    The all-to-all dispatcher does so under a capacity; a smaller count would be filled up with pairs nobody routed, silently.
    The all-gather dispatcher always counts.
    """
    if isinstance(mlp.token_dispatcher, MoEAlltoAllTokenDispatcher):
        # Its own copy: the router must not drop anything, and other layers read the same config.
        mlp.token_dispatcher.config = copy.copy(mlp.token_dispatcher.config)
        mlp.token_dispatcher.config.moe_expert_capacity_factor = 1.0
