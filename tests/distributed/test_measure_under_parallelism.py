"""Rounds are measured and decided under everything at once, and sampling a step changes no number of it."""

from tests.distributed.matrix import MOE, OVERLAP, TINY
from tests.distributed.plugin_run import run

FLAGS = {
    **TINY,
    **MOE,
    **OVERLAP,
    "bf16": True,
    "expert_model_parallel_size": 1,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "num_layers": 5,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|tttL",
    "global_batch_size": 2,
    "train_iters": 6,
    "lr_warmup_iters": 0,
}


def test_layers_with_experts_shards_and_tensor_parallelism_are_measured():
    measuring = {"dyn_rebalance": "at:4", "dyn_profile_warmup": 1, "dyn_profile_window": 2, "dyn_min_gain": 0.9}
    still = run(4, **FLAGS)
    measured = run(4, **measuring, **FLAGS)
    (line,) = measured.rounds
    assert line["outcome"] == "no_change"
    assert [layer["layer"] for layer in line["layers"]] == list(range(5))
    for layer in line["layers"]:
        assert layer["forward_seconds"] > 0
        assert layer["backward_seconds"] > 0
        # Weights, main parameters and two moments move; gradients are state, too.
        assert layer["state_bytes"] > layer["moved_bytes"] > 0
        assert layer["activation_bytes"] > 0
    assert line["head"]["forward_seconds"] > 0
    assert measured.numbers() == still.numbers()
    assert measured.state == still.state
