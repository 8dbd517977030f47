"""Megatron itself, without the plugin, trains on CPU and gloo in every way the plugin is tested in."""

import math
import os
import runpy
import sys
from pathlib import Path

import pytest
import torch

from megatron_dyn.host.pretrain import main
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import losses, tiny_gpt_arguments, train

SCRIPT = Path(__file__).parents[2] / "pretrain_gpt_dynamic.py"
NUM_STEPS = 4
PP2 = {"pipeline_model_parallel_size": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2}

KINDS = {
    "pp2": (2, PP2),
    "pp4": (4, {"pipeline_model_parallel_size": 4}),
    "dp2pp2": (4, PP2),
    "tp2pp2-dropout": (4, PP2 | DROPOUT | {"tensor_model_parallel_size": 2}),
    "vpp": (2, PP2 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "uneven-layout": (2, PP2 | {"pipeline_model_parallel_layout": "Et*5|t*3L"}),
    "uneven-vpp-layout": (2, PP2 | {"pipeline_model_parallel_layout": "Et*3|t|t*2|t*2L"}),
    "bf16": (2, PP2 | {"bf16": True}),
    "spec": (2, PP2 | {"spec": ["tests.distributed.layer_spec", "plain_layer"]}),
    "experts": (2, PP2 | EXPERTS),
    "expert-parallel": (2, EXPERTS | {"expert_model_parallel_size": 2}),
    "mtp": (2, PP2 | {"mtp_num_layers": 1, "position_embedding_type": "rope"}),
    "distributed-optimizer": (2, {"use_distributed_optimizer": True, "overlap_grad_reduce": True}),
    "recompute": (
        1,
        DROPOUT | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "llama-like": (
        1,
        {
            "swiglu": True,
            "normalization": "RMSNorm",
            "position_embedding_type": "rope",
            "group_query_attention": True,
            "num_query_groups": 2,
            "untie_embeddings_and_output_weights": True,
            "num_workers": 2,
        },
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains(kind):
    world_size, flags = KINDS[kind]
    steps_by_rank = train(tiny_gpt_arguments(train_iters=NUM_STEPS, **flags), world_size)
    assert [step.iteration for step in steps_by_rank[-1]] == list(range(1, NUM_STEPS + 1))
    assert len({tuple(step.grad_norm for step in steps) for steps in steps_by_rank}) == 1
    values = [float.fromhex(loss) for loss in losses(steps_by_rank)]
    assert all(math.isfinite(value) for value in values)
    # The mock corpus counts upwards: four steps are enough to see it being learnt.
    assert values[-1] < values[0] - 0.1


def test_the_same_run_twice_is_the_same_in_every_bit():
    argv = tiny_gpt_arguments(train_iters=NUM_STEPS, **PP2, **DROPOUT)
    assert train(argv, 2) == train(argv, 2)


def test_validation_runs_and_does_not_disturb_training():
    results = run_ranks(main, 2, tiny_gpt_arguments(train_iters=2, eval_interval=1, eval_iters=1, **PP2), expect_exit=True)
    assert [result.exitcode for result in results] == [0, 0]
    assert results[-1].output.count("validation loss at iteration") >= 2
    with_it = train(tiny_gpt_arguments(train_iters=NUM_STEPS, eval_interval=2, eval_iters=1, **PP2), 2)
    assert losses(with_it) == losses(train(tiny_gpt_arguments(train_iters=NUM_STEPS, **PP2), 2))


def train_alone(argv):
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    before = sys.argv, torch.cuda.current_device
    main(argv)
    left = {"RANK", "WORLD_SIZE", "MASTER_PORT"} & os.environ.keys()
    return before == (sys.argv, torch.cuda.current_device), left, torch.distributed.is_initialized()


def test_a_process_without_a_launcher_is_a_world_of_one_and_leaves_no_trace():
    assert run_ranks(train_alone, 1, tiny_gpt_arguments(train_iters=1)) == [(True, set(), False)]


def run_script(argv):
    sys.argv = [str(SCRIPT), *argv]
    runpy.run_path(str(SCRIPT), run_name="__main__")


def test_the_script_trains_and_tells_which_flags_it_added():
    (result,) = run_ranks(run_script, 1, tiny_gpt_arguments(train_iters=1), expect_exit=True)
    assert result.exitcode == 0, result.output
    assert result.output.count("dynamic balancing: training on CPU, so these flags were added: --transformer-impl local") == 1
    assert "iteration        1/       1" in result.output


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["--dyn-device", "cuda"],
            "--dyn-device: expected a CUDA device for 'cuda', actual: torch.cuda.is_available() is False",
        ),
        (["--sft"], "--sft: expected absent (GPT pretraining only), actual True"),
    ],
)
def test_what_cannot_be_had_ends_every_rank_with_one_clear_line(flags, line):
    results = run_ranks(run_script, 2, [*tiny_gpt_arguments(), *flags], expect_exit=True)
    assert [result.exitcode for result in results] == [2, 2]
    for result in results:
        assert [text for text in result.output.splitlines() if "error" in text and line in text]
        assert "Traceback" not in result.output
