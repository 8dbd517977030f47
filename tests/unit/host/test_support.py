"""What is refused while layers may move: every row by its flag, all at once, and nothing else."""

from types import SimpleNamespace

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.host.support import (
    LIMITS,
    RNG_LIMITS,
    check_exact_grad_norm,
    check_measurable,
    check_rng_per_layer,
    check_support,
    randomness_notice,
)
from megatron_dyn.records import Layout

USED = {
    "--pipeline-model-parallel-size 1": {"pipeline_model_parallel_size": 1},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--fp8-format": {"fp8": "hybrid"},
    "--use-precision-aware-optimizer": {"use_precision_aware_optimizer": True},
    "--overlap-param-gather-with-optimizer-step": {"overlap_param_gather_with_optimizer_step": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
    "--use-nccl-ub": {"nccl_ub": True},
    "--tensor-parallel-num-weight-shards": {"gtp_weight_remat_size": 2},
    "--optimizer": {"optimizer": "muon"},
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "--heterogeneous-layers-config-path": {"heterogeneous_layers_config_path": "layers.json"},
    "--hybrid-layer-pattern": {"hybrid_layer_pattern": "M*"},
    "--freeze-all-layers": {"freeze_all_layers": True},
    "--perform-rl-step": {"perform_rl_step": True},
    "--inprocess-restart": {"inprocess_restart": True},
    "--non-persistent-ckpt-type": {"non_persistent_ckpt_type": "local"},
    "--ckpt-format": {"ckpt_format": "torch_dcp", "save": "checkpoints"},
    "--rampup-batch-size": {"rampup_batch_size": ["8", "8", "1000"]},
    "--ckpt-assume-constant-structure": {"ckpt_assume_constant_structure": True},
}
"""For each limit, arguments that use it."""

USED_RNG = {
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--te-rng-tracker": {"te_rng_tracker": True},
    "--inference-rng-tracker": {"inference_rng_tracker": True},
    "--hybrid-layer-pattern": {"hybrid_override_pattern": "M*"},
    "--mtp-use-repeated-layer": {"mtp_use_repeated_layer": True},
    "--overlap-moe-expert-parallel-comm": {"overlap_moe_expert_parallel_comm": True},
}
"""The same for --dyn-rng-per-layer."""


def plain_args(**changes):
    """A job that layers can move in, as Megatron's defaults have it."""
    defaults = {
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "num_experts": None,
        "cuda_graph_impl": "none",
        "optimizer": "adam",
        "cpu_offloading_num_layers": 0,
        "non_persistent_ckpt_type": None,
        "ckpt_format": "torch_dist",
        "save": None,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    return SimpleNamespace(**(defaults | changes))


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_a_plain_job_is_supported(optimizer):
    check_support(plain_args(optimizer=optimizer))


@pytest.mark.parametrize(
    "used",
    [
        {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": 2},
        {"virtual_pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"context_parallel_size": 2},
        {"num_experts": 8, "expert_model_parallel_size": 2},
        {"mtp_num_layers": 1},
        {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        {"fp16": True},
        {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
        {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 3},
    ],
    ids=lambda used: next(iter(used)),
)
def test_what_layers_can_move_under_is_not_refused(used):
    check_support(plain_args(**used))


def test_iterations_may_be_skipped():
    # A forced layout that falls into them comes into force after them, see the controller.
    check_support(plain_args(iterations_to_skip=[7]))


@pytest.mark.parametrize("limit", LIMITS, ids=[limit.flag for limit in LIMITS])
def test_every_limit_is_refused_by_its_flag_and_alone(limit):
    with pytest.raises(ConfigError) as caught:
        check_support(plain_args(**USED[limit.flag]))
    message = str(caught.value)
    assert f"cannot move layers with {limit.flag} ({limit.what}); " in message
    assert message.startswith("--dyn-rebalance/--dyn-layout-at")
    assert "\n" not in message


def test_all_that_stand_in_the_way_are_named_at_once():
    with pytest.raises(ConfigError, match=r"--cuda-graph-impl.*; --fp8-format.*; --freeze-all-layers"):
        check_support(plain_args(freeze_all_layers=True, fp8="hybrid", cuda_graph_impl="local"))


def test_mtp_apart_from_the_loss_cannot_be_planned_by_measurement():
    check_measurable(Layout.parse("Et|tt|tmL", 3))
    with pytest.raises(
        ConfigError, match=r"--dyn-rebalance: expected MTP layers \(m\) on the chunk of the loss \(L\), got chunk 1"
    ):
        check_measurable(Layout.parse("Et|tm|L", 3))


def test_flags_are_named_once_each():
    flags = [limit.flag for limit in LIMITS]
    assert len(set(flags)) == len(flags)


def test_every_limit_is_tested_and_no_other():
    assert USED.keys() == {limit.flag for limit in LIMITS}
    assert USED_RNG.keys() == {limit.flag for limit in RNG_LIMITS}


@pytest.mark.parametrize("flag", USED_RNG)
def test_streams_per_layer_are_refused_with_the_flag_that_keeps_them_from_working(flag):
    with pytest.raises(ConfigError) as caught:
        check_rng_per_layer(plain_args(**USED_RNG[flag]))
    assert str(caught.value).startswith(f"--dyn-rng-per-layer: cannot be had with {flag} (")


@pytest.mark.parametrize("changes", [{}, {"tensor_model_parallel_size": 2, "num_experts": 8, "mtp_num_layers": 1}])
def test_streams_per_layer_can_be_had_wherever_every_layer_runs_whole(changes):
    check_rng_per_layer(plain_args(**changes))


@pytest.mark.parametrize(
    ("flag", "name"), [("--use-megatron-fsdp", "use_megatron_fsdp"), ("--use-torch-fsdp2", "use_torch_fsdp2")]
)
def test_the_exact_norm_is_refused_where_gradients_are_shards_with_both_flags(flag, name):
    with pytest.raises(ConfigError) as caught:
        check_exact_grad_norm(plain_args(**{name: True}))
    assert str(caught.value) == f"--dyn-exact-grad-norm: cannot be had with {flag}; drop one of them"


@pytest.mark.parametrize("changes", [{}, {"use_megatron_fsdp": False, "use_torch_fsdp2": False}])
def test_the_exact_norm_can_be_had_in_a_plain_job_and_where_layers_cannot_move(changes):
    check_exact_grad_norm(plain_args(**changes))
    check_exact_grad_norm(plain_args(pipeline_model_parallel_size=1, num_experts=8, **changes))


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ({}, None),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1:"),
        ({"hidden_dropout": 0.1, "attention_dropout": 0.25}, "--hidden-dropout 0.1, --attention-dropout 0.25:"),
    ],
)
def test_dropout_is_told_to_make_moves_inexact(rates, expected):
    notice = randomness_notice(plain_args(**rates))
    assert notice is None if expected is None else notice.startswith(expected)
    # The notice names the cure.
    assert notice is None or notice.endswith("; --dyn-rng-per-layer makes it so")
