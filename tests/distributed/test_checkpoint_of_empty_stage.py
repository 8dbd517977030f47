"""A stage that lost all its layers is saved and loaded like any other; Megatron alone fails on one that holds nothing."""

import pytest

from tests.distributed.matrix import TINY
from tests.distributed.plugin_run import run

FLAGS = {
    **TINY,
    "num_layers": 6,
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_layout": "Et|tt|tt|tL",
    "global_batch_size": 2,
    "lr_warmup_iters": 0,
    "lr_decay_iters": 6,
    "bf16": True,
    "use_distributed_optimizer": True,
    "ckpt_format": "torch_dist",
    "dyn_allow_empty_stages": True,
    "use_checkpoint_opt_param_scheduler": True,
}


@pytest.mark.parametrize("reshardable", [True, False], ids=["reshardable", "default"])
def test_a_run_continues_from_a_layout_with_an_empty_stage(tmp_path, reshardable):
    flags = {**FLAGS, "dist_ckpt_optim_fully_reshardable": reshardable}
    whole = run(4, **{**flags, "train_iters": 6})
    run(4, dyn_layout_at="2:Ett||ttt|tL", save=str(tmp_path), save_interval=4, **{**flags, "train_iters": 4})
    # Without a layout of its own it continues at the checkpoint's, and a layer comes to the empty stage.
    own = {**flags, "train_iters": 6, "pipeline_model_parallel_layout": None, "dyn_layout_from_checkpoint": True}
    own |= {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 1}
    resumed = run(4, load=str(tmp_path), dyn_layout_at="5:Et|tt|tt|tL", **own)
    assert [line["layout"] for line in resumed.losses] == ["Et*2||t*3|tL", "Et|t*2|t*2|tL"]
    assert resumed.numbers() == whole.numbers()[4:]
    assert resumed.state == whole.state
