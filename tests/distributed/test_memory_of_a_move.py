"""A move never holds a stage twice: what it needs beyond what was there is the state in flight, and bounded buckets."""

import pytest

from tests.distributed.plugin_run import run

NUM_LAYERS = 10
FLAGS = {
    "num_layers": NUM_LAYERS,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Et*8|t*2L",
    "hidden_size": 512,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 4,
    "clip_grad": 0.5,
}
LAYER_PARAMETERS = 12 * 512 * 512
STAGE_PARAMETERS = 8 * LAYER_PARAMETERS


@pytest.mark.parametrize(
    ("optimizer", "state_bytes", "again_bytes"),
    [
        # fp32 parameters and two moments, 12 bytes a parameter, move; nothing that stays is touched.
        pytest.param({}, 12, 0, id="plain"),
        # bf16 parameters, fp32 main parameters and moments; Megatron fills its new bf16 buffer from the old one.
        pytest.param({"bf16": True, "use_distributed_optimizer": True}, 14, 2, id="sharded"),
    ],
)
def test_a_move_needs_the_state_in_flight_and_not_the_stage_again(optimizer, state_bytes, again_bytes):
    # The first move makes what stays for good (connections, the allocator's arenas): the later ones tell.
    layouts = "1:Et*7|t*3L;2:Et*8|t*2L;3:Et*7|t*3L"
    moved = run(2, dyn_layout_at=layouts, dyn_migrate_bucket_bytes=1 << 20, **FLAGS, **optimizer)
    peaks = [line["peak_extra_bytes"] for line in moved.rounds]
    assert all(peak is not None for peak in peaks)
    in_flight = LAYER_PARAMETERS * state_bytes
    assert [line["moved_bytes"] for line in moved.rounds] == pytest.approx([in_flight] * 3, rel=0.1)
    # In flight: the layer itself, and one layer's fresh parameters while it is built. Besides: what Megatron doubles.
    bound = 1.5 * in_flight + again_bytes * STAGE_PARAMETERS + 8 * 2**20
    assert max(peaks[1:]) < bound
    # The stage again would be more than that, or the bound shows nothing.
    assert bound < 0.6 * STAGE_PARAMETERS * state_bytes
