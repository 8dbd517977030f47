"""What the host offers to families, on real ranks: exact gradient norms that depend neither on layout nor on sharding."""

import pytest

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.dynamic_run import look

STEP = 2
FLAGS = {"num_layers": 4, "hidden_size": 16, "num_attention_heads": 2, "train_iters": 3, "pipeline_model_parallel_size": 2}


def found(world_size, **flags):
    return run_ranks(look, world_size, tiny_gpt_arguments(**FLAGS, **flags), STEP)


def test_norms_are_those_of_the_gradients_the_same_everywhere_and_whatever_the_layout():
    plain = found(2)
    squares = {layer: square for rank in plain for layer, square in rank["mine"].items()}
    assert plain[0]["norms"] == plain[1]["norms"]
    # The norm is fp32, and our sum of squares here is not exact.
    assert plain[0]["norms"] == pytest.approx([squares[layer] ** 0.5 for layer in range(4)], rel=1e-6)
    assert min(plain[0]["norms"]) > 0
    # The layout changes after step 1, so that step 2 runs on other stages.
    moved = found(2, dyn_layout_at="1:Et|tttL")
    assert moved[0]["norms"] == plain[0]["norms"]
    assert all(all(rank["zeros"]) for rank in (*plain, *moved))


def test_every_parameter_is_counted_once_and_shards_make_the_same_norms():
    # 12 parameters in a layer with biases; data parallel over two ranks, whole or in shards.
    whole = found(4)
    sharded = found(4, use_distributed_optimizer=True)
    assert [rank["counted"] for rank in (*whole, *sharded)] == [[48]] * 8
    assert {tuple(rank["norms"]) for rank in (*whole, *sharded)} == {tuple(whole[0]["norms"])}
