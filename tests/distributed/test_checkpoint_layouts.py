"""Checkpoints know their layout: a run continues at it, drops it where it does not fit, and refuses what it would misplace.

All runs are one run of four steps, in parts: each part gives the losses of the whole in every bit.
"""

import pytest
from megatron.core.dist_checkpointing import load_common_state_dict

from tests.distributed.plugin_run import read_lines, run_to_exit, train

UNEVEN, MOVED, UNIFORM, PP4 = "Et*3|t*5L", "Et*2|t*6L", "Et*4|t*4L", "Et*2|t*2|t*2|t*2L"
FLAGS = {"train_iters": 4, "clip_grad": 0.0}
START = {"pipeline_model_parallel_layout": UNEVEN}
# Moves are possible, so that the plugin is in force, but none falls into the run.
WATCH = {"dyn_rebalance": "at:1000"}
MOVE = {"dyn_layout_at": f"1:{MOVED}"}
DISTRIBUTED = {"use_distributed_optimizer": True}
ASYNC = {"async_save": True, "use_persistent_ckpt_worker": True}


def part(folder, *, num_stages=2, **flags):
    """Train some of the four steps: how the ranks ended, and (iteration, layout, loss) of each step."""
    report = folder / "report"
    flags |= {"dyn_report_dir": str(report), "dyn_record_losses": True, "pipeline_model_parallel_size": num_stages}
    results = run_to_exit(num_stages, train, **FLAGS | flags)
    steps = [(line["iteration"], line["layout"], line["losses"]["lm loss"]) for line in read_lines(report / "losses.jsonl")]
    return results, steps


def succeeded(results):
    assert [result.exitcode for result in results] == [0] * len(results), results[0].error or results[0].output[-2000:]
    return [line for line in results[0].output.splitlines() if "the checkpoint was written at layout" in line]


def save(folder, **flags):
    """Train the first two steps and save; the folder with the checkpoint."""
    results, steps = part(folder, save=str(folder), save_interval=2, exit_interval=2, **START | flags)
    assert succeeded(results) == []
    assert len(steps) == 2
    return folder


def resume(folder, checkpoint, **flags):
    return part(folder, load=str(checkpoint), **flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    results, steps = part(tmp_path_factory.mktemp("whole"), **START)
    succeeded(results)
    return [loss for _, _, loss in steps]


@pytest.fixture(scope="module")
def default_format(tmp_path_factory):
    return save(tmp_path_factory.mktemp("default"), **DISTRIBUTED, **WATCH)


@pytest.mark.parametrize("kind", [ASYNC, {"ckpt_format": "torch"}], ids=["torch_dist-async", "torch"])
def test_a_run_that_moved_continues_where_it_was_and_moves_on(tmp_path, whole, kind):
    checkpoint = save(tmp_path / "first", **kind, **MOVE)
    results, steps = resume(
        tmp_path, checkpoint, dyn_layout_at=f"3:{UNIFORM}", ckpt_format=kind.get("ckpt_format", "torch_dist")
    )
    (line,) = succeeded(results)
    assert f"written at layout {MOVED!r} (2 stages); this run continues there, not at {UNIFORM!r}" in line
    assert steps == [(3, MOVED, whole[2]), (4, UNIFORM, whole[3])]
    if "ckpt_format" in kind:
        results, _ = resume(tmp_path, checkpoint, no_load_optim=True, **kind, **START, **WATCH)
        refused(results, "--ckpt-format torch_dist")


def test_a_fully_reshardable_checkpoint_loads_on_other_stages_and_its_layout_is_dropped(tmp_path, whole):
    reshardable = DISTRIBUTED | WATCH | {"dist_ckpt_optim_fully_reshardable": True}
    checkpoint = save(tmp_path / "first", **reshardable)
    results, steps = resume(tmp_path, checkpoint, num_stages=4, **reshardable)
    (line,) = succeeded(results)
    assert f"written at layout {UNEVEN!r} (2 stages), which does not fit this run and is dropped: it starts at {PP4!r}" in line
    assert steps == [(3, PP4, whole[2]), (4, PP4, whole[3])]


def test_the_layout_is_plain_text_in_the_saved_arguments_before_the_first_move_too(default_format):
    saved_args = load_common_state_dict(default_format / "iter_0000002")["args"]
    assert vars(saved_args)["dyn_layout_in_force"] == f"2:{UNEVEN}"


def test_the_default_format_continues_at_its_layout(tmp_path, whole, default_format):
    results, steps = resume(tmp_path, default_format, **DISTRIBUTED, **WATCH)
    succeeded(results)
    assert steps == [(3, UNEVEN, whole[2]), (4, UNEVEN, whole[3])]


@pytest.mark.parametrize(
    "there",
    [{"num_stages": 4}, {"pipeline_model_parallel_layout": UNIFORM}],
    ids=["other-stages", "same-stages-other-counts"],
)
def test_the_default_format_is_refused_at_another_layout_before_anything_is_loaded(tmp_path, default_format, there):
    results, steps = resume(tmp_path, default_format, **DISTRIBUTED, **WATCH, **there)
    refused(results, "--dist-ckpt-optim-fully-reshardable", "--no-load-optim")
    assert steps == []


def refused(results, *flags):
    """All ranks end with exit code 2, the first with one line that names the flags, before Megatron loads."""
    assert [result.exitcode for result in results] == [2] * len(results)
    (line,) = [line for line in results[0].output.splitlines() if line.startswith("megatron_dyn: error:")]
    assert all(flag in line for flag in flags)
    assert "checkpoint from" not in results[0].output
