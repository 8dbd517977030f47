"""A sequence split over two ranks gives the losses of the whole one: what the matrix moves under CP does attend right."""

import pytest

from tests.distributed.plugin_run import Run, run

FLAGS = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "pipeline_model_parallel_size": 2,
    # Learned positions would start elsewhere: Megatron draws them after a warm-up, which draws by the length on each rank.
    "position_embedding_type": "rope",
    # At the usual 0.02 attention is nearly even, and a wrong mask would hardly be seen in the loss.
    "init_method_std": 0.3,
}
SPLIT = {"context_parallel_size": 2, "spec": ("tests.distributed.context_parallel_spec", "context_parallel_layer")}


def test_context_parallel_losses_and_norms_are_those_of_the_whole_sequence():
    # fp32 sums in another order: worst seen 2e-7 over 4 steps. Wrong masks show from 3e-3 on, wrong gradients from 4e-4 on.
    assert numbers(run(4, **FLAGS, **SPLIT)) == pytest.approx(numbers(run(2, **FLAGS)), rel=1e-5)


def numbers(trained: Run) -> list[float]:
    """Loss and gradient norm of each step."""
    return [float.fromhex(number) for line in trained.losses for number in (*line["losses"].values(), line["grad_norm"])]
