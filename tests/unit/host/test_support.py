"""What is refused while layers may move: every row by its flag, all at once, and nothing else."""

from types import SimpleNamespace

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.host.support import LIMITS, check_exact_grad_norm, check_support, randomness_notice

USED = {
    "--pipeline-model-parallel-size 1": {"pipeline_model_parallel_size": 1},
    "--use-distributed-optimizer": {"use_distributed_optimizer": True},
    "--num-layers-per-virtual-pipeline-stage": {"virtual_pipeline_model_parallel_size": 2},
    "--tensor-model-parallel-size": {"tensor_model_parallel_size": 2},
    "--context-parallel-size": {"context_parallel_size": 2},
    "--num-experts": {"num_experts": 8},
    "--use-megatron-fsdp": {"use_megatron_fsdp": True},
    "--use-torch-fsdp2": {"use_torch_fsdp2": True},
    "--cuda-graph-impl": {"cuda_graph_impl": "local"},
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "--overlap-grad-reduce": {"overlap_grad_reduce": True},
    "--overlap-param-gather": {"overlap_param_gather": True},
    "--fp16": {"fp16": True},
    "--fp8-format": {"fp8": "hybrid"},
    "--optimizer": {"optimizer": "muon"},
    "--optimizer-cpu-offload": {"optimizer_cpu_offload": True},
    "--cpu-offloading-num-layers": {"cpu_offloading_num_layers": 2},
    "--account-for-embedding-in-pipeline-split": {"account_for_loss_in_pipeline_split": True},
    "--decoder-first-pipeline-num-layers": {"decoder_last_pipeline_num_layers": 3},
    "--heterogeneous-layers-config-path": {"heterogeneous_layers_config_path": "layers.json"},
    "--hybrid-layer-pattern": {"hybrid_layer_pattern": "M*"},
    "--freeze-all-layers": {"freeze_all_layers": True},
    "--perform-rl-step": {"perform_rl_step": True},
    "--inprocess-restart": {"inprocess_restart": True},
    "--non-persistent-ckpt-type": {"non_persistent_ckpt_type": "local"},
    "--ckpt-format": {"ckpt_format": "torch", "save": "checkpoints"},
    "--rampup-batch-size": {"rampup_batch_size": ["8", "8", "1000"]},
    "--ckpt-assume-constant-structure": {"ckpt_assume_constant_structure": True},
}
"""For each limit, arguments that use it."""


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
    with pytest.raises(ConfigError, match=r"--tensor-model-parallel-size.*; --num-experts.*; --fp16"):
        check_support(plain_args(tensor_model_parallel_size=2, num_experts=4, fp16=True))


def test_flags_are_named_once_each():
    flags = [limit.flag for limit in LIMITS]
    assert len(set(flags)) == len(flags)


def test_every_limit_is_tested_and_no_other():
    assert USED.keys() == {limit.flag for limit in LIMITS}


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
