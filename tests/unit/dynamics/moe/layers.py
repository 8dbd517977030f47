"""A small layer with experts, built through our spec: what the tests of specs and family share."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dyn.dynamics.moe.settings import MoeSettings
from megatron_dyn.dynamics.moe.specs import router_of, with_router

NUM_EXPERTS, TOPK, HIDDEN = 4, 2, 8


class Layer(torch.nn.Module):
    """Stands for a decoder layer: its experts alone."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        super().__init__()
        self.mlp = mlp


def experts_of(spec: ModuleSpec) -> MoESubmodules:
    """The part of a layer's spec that names the router; in a partial since 0.18, in a ModuleSpec before."""
    mlp = spec.submodules.mlp
    return mlp.submodules if isinstance(mlp, ModuleSpec) else mlp.keywords["submodules"]


def build_layer(settings: MoeSettings, dispatcher: str = "alltoall") -> Layer:
    """A layer of four experts in training, the same every time. Megatron's groups must exist."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=6,
        moe_router_topk=TOPK,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type=dispatcher,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    spec: Any = get_gpt_layer_local_spec(num_experts=NUM_EXPERTS, moe_grouped_gemm=False)
    if (router := router_of(settings)) is not None:
        spec = with_router(spec, router)
    torch.manual_seed(0)
    return Layer(build_module(ModuleSpec(module=MoELayer, submodules=experts_of(spec)), config=config)).train()
