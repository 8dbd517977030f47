"""Megatron itself, without the plugin, saves and resumes on CPU: resumed or not, a run is the same in every bit."""

import pytest

from megatron_dyn.testing.training import losses, tiny_gpt_arguments, train

NUM_STEPS, SAVED_AT = 4, 2
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
KINDS = {
    "fp32-dp2": {},
    "bf16-pp2-reshardable": {
        "pipeline_model_parallel_size": 2,
        "dist_ckpt_optim_fully_reshardable": True,
        "bf16": True,
    },
}


def run(world_size, **flags):
    return train(tiny_gpt_arguments(train_iters=NUM_STEPS, **flags), world_size)


def save_to(folder):
    return {"save": folder, "save_interval": SAVED_AT, "exit_interval": SAVED_AT}


@pytest.mark.parametrize("kind", KINDS)
def test_with_the_distributed_optimizer_and_dropout(kind, tmp_path):
    flags = KINDS[kind] | DROPOUT | {"use_distributed_optimizer": True}
    first, second = run(2, **flags, **save_to(tmp_path)), run(2, **flags, load=tmp_path)
    assert [a + b for a, b in zip(first, second, strict=True)] == run(2, **flags)


def test_on_one_stage_and_from_there_on_two(tmp_path):
    first, second = run(1, **save_to(tmp_path)), run(1, load=tmp_path)
    assert [first[0] + second[0]] == run(1)
    # Stages draw their initial weights from different seeds: only a checkpoint gives one and two the same start.
    on_two = losses(run(2, load=tmp_path, pipeline_model_parallel_size=2))
    assert on_two[0] == losses(second)[0]
    assert [float.fromhex(loss) for loss in on_two] == pytest.approx([float.fromhex(loss) for loss in losses(second)])
