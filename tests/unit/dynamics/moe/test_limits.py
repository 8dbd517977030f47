"""What mixture of experts cannot be had with: refused, with the flag named, and nothing else is."""

from types import SimpleNamespace

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.moe.limits import LIMITS, check_moe
from megatron_dyn.dynamics.moe.settings import Assignment, MoeSettings, Routing

AUCTION = MoeSettings(routing=Routing.S_BASE, assignment=Assignment.AUCTION)


def arguments(**changes):
    """Megatron's, as validated, for a plain model with experts."""
    plain = {
        "num_experts": 4,
        "moe_router_topk": 2,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_router_enable_expert_bias": False,
        "moe_router_fusion": False,
        "moe_router_num_groups": None,
        "moe_expert_capacity_factor": None,
        "moe_router_score_function": "softmax",
        "moe_router_pre_softmax": False,
        "moe_router_topk_scaling_factor": None,
        "moe_token_dispatcher_type": "alltoall",
        "mtp_num_layers": None,
        "seq_length": 16,
        "micro_batch_size": 1,
        "context_parallel_size": 1,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
    }
    return SimpleNamespace(**plain | changes)


@pytest.mark.parametrize("routing", list(Routing))
def test_a_plain_model_with_experts_is_welcome(routing):
    check_moe(MoeSettings(record=True, routing=routing), arguments())


USES = {
    "--moe-aux-loss-coeff": {"moe_aux_loss_coeff": [0.0, 1e-2]},
    "--moe-router-load-balancing-type sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "--moe-router-load-balancing-type quantile_balancing": {"moe_router_load_balancing_type": "quantile_balancing"},
    "--moe-router-enable-expert-bias": {"moe_router_enable_expert_bias": True},
    "--moe-router-fusion": {"moe_router_fusion": True},
    "--moe-enable-routing-replay": {"moe_enable_routing_replay": True},
    "--moe-router-force-load-balancing": {"moe_router_force_load_balancing": True},
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "--moe-router-num-groups": {"moe_router_num_groups": 2},
    "--moe-expert-capacity-factor": {"moe_expert_capacity_factor": 1.0},
    "--moe-router-score-function": {"moe_router_score_function": "sigmoid"},
    "--moe-router-pre-softmax": {"moe_router_pre_softmax": True},
    "--moe-router-topk-scaling-factor": {"moe_router_topk_scaling_factor": 2.5},
    "--moe-token-dispatcher-type flex": {"moe_token_dispatcher_type": "flex"},
}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.flag)
def test_each_limit_refuses_its_routings_only(limit):
    args = arguments(**USES[limit.flag])
    for routing in Routing:
        settings = MoeSettings(record=True, routing=routing)
        if routing in limit.routings:
            with pytest.raises(ConfigError) as error:
                check_moe(settings, args)
            assert str(error.value).startswith(f"--dyn-moe-routing {routing.value}: cannot be had with {limit.flag} (")
        else:
            check_moe(settings, args)


@pytest.mark.parametrize(
    ("settings", "changes", "told"),
    [
        (MoeSettings(record=True), {"num_experts": None}, "--dyn-moe: expected a model with experts (--num-experts)"),
        (MoeSettings(record=True), {"moe_router_topk": 5}, "--moe-router-topk: expected at most the 4 experts, got 5"),
        (AUCTION, {"seq_length": 18}, "multiples of the 4 experts, got 18"),
        (
            AUCTION,
            {"seq_length": 20, "tensor_model_parallel_size": 2, "sequence_parallel": True},
            "multiples of the 4 experts, got 10",
        ),
    ],
)
def test_what_cannot_be_right_is_refused(settings, changes, told):
    with pytest.raises(ConfigError) as error:
        check_moe(settings, arguments(**changes))
    assert told in str(error.value)


def test_an_even_share_is_asked_for_by_the_auction_only():
    check_moe(AUCTION, arguments())
    check_moe(MoeSettings(routing=Routing.S_BASE), arguments(seq_length=18))
