"""What can go wrong in a move, injected for real: the job goes on as it was, or ends with one clear line, never hangs."""

import tempfile
from pathlib import Path

import pytest

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed import faulty_run
from tests.distributed.plugin_run import REPORT_FLAGS, merge, read_lines, run, run_to_exit

FLAGS = {"pipeline_model_parallel_size": 2, "train_iters": 6, "clip_grad": 0.5}
MOVES = {"dyn_layout_at": "2:Et*2|t*6L;4:Et*2|t*6L"}


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (faulty_run.corrupt_first_transfer, "rank 1: layer 2: checksum differs, expected 0x"),
        (faulty_run.refuse_first_move, "rank 1: MemoryError: no room for layer 2"),
    ],
    ids=["corrupted-transfer", "vote-no"],
)
def test_an_aborted_move_leaves_the_job_as_it_was_and_the_next_one_works(fault, told):
    still = run(2, **FLAGS)
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny_gpt_arguments(**{"dyn_report_dir": folder, **REPORT_FLAGS, **FLAGS, **MOVES})
        dumps = run_ranks(fault, 2, argv, timeout_seconds=120)
        rounds, losses = read_lines(Path(folder) / "rounds.jsonl"), read_lines(Path(folder) / "losses.jsonl")
    assert [line["outcome"] for line in rounds] == ["abort", "commit"]
    assert rounds[0]["reason"].startswith(told)
    assert rounds[0]["layout_after"] == rounds[0]["layout_before"] == "Et*4|t*4L"
    assert [line["layout"] for line in losses] == ["Et*4|t*4L"] * 4 + ["Et*2|t*6L"] * 2
    assert [(line["iteration"], line["losses"], line["grad_norm"]) for line in losses] == still.numbers()
    assert merge([dump["state"] for dump in dumps]) == still.state


def test_a_rank_that_dies_in_a_move_ends_the_job_and_the_last_checkpoint_loads(tmp_path):
    save = {"save": str(tmp_path), "save_interval": 2, "ckpt_format": "torch_dist"}
    results = run_to_exit(2, faulty_run.die_while_moving, dyn_timeout_seconds=20, dyn_layout_at="3:Et*2|t*6L", **FLAGS, **save)
    assert results[1].exitcode == 9
    assert results[0].exitcode == 1
    line = error_line(results[0].output)
    assert line.startswith("megatron_dyn: error: rank 0: ")
    assert "rank" in line
    whole = run(2, **FLAGS)
    resumed = run(2, load=str(tmp_path), **FLAGS)
    assert [line["iteration"] for line in resumed.losses] == [3, 4, 5, 6]
    assert resumed.numbers() == whole.numbers()[2:]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (faulty_run.hang_while_moving, "failed within 3 s"),
        (faulty_run.plan_differently, "ranks planned differently"),
        (faulty_run.fail_to_commit, "failed, restart from the last checkpoint: rank 1: MemoryError"),
    ],
    ids=["hang", "other-plan", "commit"],
)
def test_what_cannot_go_on_ends_with_one_line_within_the_timeout(fault, told):
    results = run_to_exit(2, fault, timeout_seconds=60, dyn_timeout_seconds=3, dyn_layout_at="1:Et*6|t*2L", **FLAGS)
    assert results[0].exitcode == 1
    assert told in error_line(results[0].output)


def error_line(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("megatron_dyn: error:")]
    assert len(lines) == 1, f"expected one error line, got {lines}"
    return lines[0]
