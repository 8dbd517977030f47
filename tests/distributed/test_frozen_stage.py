"""Case C8: a stage without a trainable parameter trains, moves keep what is frozen, and all ranks list the same groups."""

import tempfile
from pathlib import Path
from typing import Any

import pytest

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.frozen_run import train_with_frozen_layers
from tests.distributed.matrix import TINY
from tests.distributed.plugin_run import REPORT_FLAGS, merge, read_lines

FROZEN = (0, 1)
FLAGS = {
    **TINY,
    "num_layers": 5,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|tttL",
    "global_batch_size": 2,
    "train_iters": 6,
    "lr_warmup_iters": 0,
    "lr_decay_iters": 6,
    "untie_embeddings_and_output_weights": True,
}


def frozen_run(**flags: Any) -> tuple[list[dict], list[dict], list[dict]]:
    """(what each rank found, its losses, its rounds)."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny_gpt_arguments(**{"dyn_report_dir": folder, **REPORT_FLAGS, **FLAGS, **flags})
        found = run_ranks(train_with_frozen_layers, 2, argv, FROZEN, timeout_seconds=120)
        return found, read_lines(Path(folder) / "losses.jsonl"), read_lines(Path(folder) / "rounds.jsonl")


@pytest.mark.parametrize("optimizer", [{}, {"use_distributed_optimizer": True, "bf16": True}], ids=["plain", "sharded-bf16"])
def test_a_frozen_stage_trains_and_moves_keep_what_is_frozen(optimizer):
    still, still_losses, _ = frozen_run(**optimizer)
    # Trainable layers come to the frozen stage and leave it bare again; a frozen layer visits the other stage.
    moved, losses, rounds = frozen_run(dyn_layout_at="1:Etttt|tL;3:Et|ttttL;4:Ett|tttL", **optimizer)

    assert [line["outcome"] for line in rounds] == ["commit"] * 3
    assert [(line["losses"], line["grad_norm"]) for line in losses] == [
        (line["losses"], line["grad_norm"]) for line in still_losses
    ]
    state = merge([each["state"] for each in moved])
    assert state == merge([each["state"] for each in still])
    for layer in range(5):
        flags = {described["requires_grad"] for name, described in state.items() if name.startswith(f"layer {layer} ")}
        assert flags == {layer not in FROZEN}
    assert moved[0]["num_trained"] == 0
    assert moved[0]["groups"] == moved[1]["groups"] == still[0]["groups"]


def test_the_norm_of_two_stages_is_that_of_one_process(tmp_path):
    """From one checkpoint, since initial weights depend on the stage; Megatron cannot save moments of some layers only."""
    frozen_run(save=str(tmp_path), save_interval=2, train_iters=2, ckpt_format="torch_dist", no_save_optim=True)
    flags = {"load": str(tmp_path), "train_iters": 4, "no_load_optim": True}
    _, two, _ = frozen_run(**flags)
    with tempfile.TemporaryDirectory() as folder:
        one_stage = {"pipeline_model_parallel_size": 1, "pipeline_model_parallel_layout": None}
        argv = tiny_gpt_arguments(**{"dyn_report_dir": folder, **REPORT_FLAGS, **FLAGS, **flags, **one_stage})
        run_ranks(train_with_frozen_layers, 1, argv, FROZEN, timeout_seconds=120)
        one = read_lines(Path(folder) / "losses.jsonl")
    assert [line["iteration"] for line in two] == [3, 4]
    assert [(line["losses"], line["grad_norm"]) for line in two] == [(line["losses"], line["grad_norm"]) for line in one]
