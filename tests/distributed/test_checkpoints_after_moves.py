"""A checkpoint written after a move is an ordinary one: stock Megatron loads it at any layout, and ours loads theirs."""

import importlib

import pytest

from megatron_dyn.testing.training import losses, tiny_gpt_arguments
from megatron_dyn.testing.training import train as train_stock
from tests.distributed.plugin_run import read_lines, run, run_to_exit, train

FLAGS = {
    "pipeline_model_parallel_size": 2,
    "train_iters": 8,
    "clip_grad": 0.0,
    "ckpt_format": "torch_dist",
    # Tied, the gradients of both ends would add up in another order on one stage than on two.
    "untie_embeddings_and_output_weights": True,
}
STOP = {"save_interval": 5, "exit_interval": 5}


def stock(argv):
    importlib.import_module("megatron_dyn.host.pretrain").main(argv)


def stop_after_five_steps(function, folder, **flags):
    """Train five of the eight steps and save."""
    results = run_to_exit(2, function, save=str(folder), **FLAGS, **STOP, **flags)
    assert [result.exitcode for result in results] == [0, 0], results[0].output[-2000:]


@pytest.fixture(scope="module")
def whole():
    return run(2, **FLAGS)


@pytest.fixture(scope="module")
def moved_checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moved")
    report = folder / "report"
    stop_after_five_steps(
        train, folder, dyn_layout_at="2:Et*2|t*6L;4:Et*3|t*5L", dyn_report_dir=str(report), dyn_record_losses=True
    )
    layouts = [line["layout"] for line in read_lines(report / "losses.jsonl")]
    assert layouts == ["Et*4|t*4L"] * 2 + ["Et*2|t*6L"] * 2 + ["Et*3|t*5L"]
    return folder


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {"pipeline_model_parallel_layout": "Et*7|tL"}),
        (2, {}),
        (4, {"pipeline_model_parallel_size": 4}),
        (1, {"pipeline_model_parallel_size": 1}),
    ],
    ids=["another-layout", "uniform", "pp4", "pp1"],
)
def test_stock_megatron_resumes_a_moved_run_at_any_layout(moved_checkpoint, whole, world_size, layout):
    resumed = train_stock(tiny_gpt_arguments(load=str(moved_checkpoint), **FLAGS | layout), world_size)
    assert losses(resumed) == [line["losses"]["lm loss"] for line in whole.losses[5:]]


def test_ours_resumes_a_stock_checkpoint_and_moves_on(tmp_path, whole):
    stop_after_five_steps(stock, tmp_path)
    resumed = run(2, load=str(tmp_path), dyn_layout_at="6:Et*6|t*2L", **FLAGS)
    assert [line["losses"] for line in resumed.losses] == [line["losses"] for line in whole.losses[5:]]
    assert [line["layout"] for line in resumed.losses] == ["Et*4|t*4L", "Et*6|t*2L", "Et*6|t*2L"]
    assert resumed.state == whole.state


def test_a_forced_layout_that_is_due_is_in_force_from_the_first_step_after_a_resume(moved_checkpoint, whole):
    resumed = run(2, load=str(moved_checkpoint), dyn_layout_at="2:Et*2|t*6L;6:Et|t*7L", **FLAGS)
    assert [line["layout"] for line in resumed.losses] == ["Et*2|t*6L", "Et|t*7L", "Et|t*7L"]
    assert [line["losses"] for line in resumed.losses] == [line["losses"] for line in whole.losses[5:]]
    assert resumed.state == whole.state
