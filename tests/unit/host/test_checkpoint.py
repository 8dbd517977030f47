"""What a checkpoint's layout decides: where the run starts, and what must not be loaded; each answer in one line."""

import argparse
import sys
from types import SimpleNamespace

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.host import checkpoint
from megatron_dyn.host.checkpoint import Saved, continue_at_saved_layout, finish_saves, guard, refusal
from megatron_dyn.host.layout import STAMP, layout_of_args, stamp, stamped_layout
from megatron_dyn.records import Layout

UNIFORM, UNEVEN = Layout.contiguous([4, 4]), Layout.contiguous([3, 5])
FOUR = Layout.contiguous([2, 2, 2, 2])
INTERLEAVED = Layout.contiguous([2, 2, 2, 2], num_stages=2)


def job_args(**changes):
    """Validated arguments of eight layers on two stages, as far as layouts and checkpoints read them."""
    defaults = {
        "num_layers": 8,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": None,
        "pipeline_model_parallel_layout": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "use_distributed_optimizer": True,
        "no_load_optim": False,
        "finetune": False,
        "load": "saves",
        "pretrained_checkpoint": None,
    }
    return argparse.Namespace(**(defaults | changes))


def saved(layout=UNEVEN, **changes):
    return Saved(**({"source": "--load saves", "layout": layout, "stage_numbering": False, "optimizer_format": None} | changes))


@pytest.fixture
def found(monkeypatch):
    """Let `read` find what the test says, which starts as nothing."""
    box = SimpleNamespace(saved=None, read=[])

    def read(args, load_arg="load"):
        box.read.append(load_arg)
        if isinstance(box.saved, Exception):
            raise box.saved
        return box.saved

    monkeypatch.setattr(checkpoint, "read", read)
    return box


def test_the_stamp_is_plain_text_with_the_number_of_stages_and_reads_back():
    args = job_args()
    assert stamped_layout(args) is None
    stamp(args, INTERLEAVED)
    assert getattr(args, STAMP) == "2:Et*2|t*2|t*2|t*2L"
    assert stamped_layout(args) == INTERLEAVED != FOUR


@pytest.mark.parametrize("wanted", [None, True])
def test_a_run_without_a_layout_of_its_own_continues_at_that_of_the_checkpoint(found, wanted):
    args, found.saved = job_args(), saved()
    told = continue_at_saved_layout(args, UNIFORM, wanted=wanted)
    assert layout_of_args(args) == UNEVEN
    assert told == (
        "--load saves: the checkpoint was written at layout 'Et*3|t*5L' (2 stages); this run continues there, "
        "not at 'Et*4|t*4L' (2 stages)"
    )


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [({}, False), ({"pipeline_model_parallel_layout": "Et*4|t*4L"}, None), ({"decoder_first_pipeline_num_layers": 4}, None)],
)
def test_what_the_user_says_wins(found, flags, wanted):
    args, found.saved = job_args(**flags), saved()
    told = continue_at_saved_layout(args, UNIFORM, wanted=wanted)
    assert args == job_args(**flags)
    assert told.endswith("; this run starts at 'Et*4|t*4L' (2 stages), as its flags say")


def test_unless_the_user_says_that_the_checkpoint_wins_and_then_no_other_flag_contradicts_it(found):
    args, found.saved = job_args(decoder_first_pipeline_num_layers=4, account_for_loss_in_pipeline_split=True), saved()
    continue_at_saved_layout(args, UNIFORM, wanted=True)
    assert args == job_args(pipeline_model_parallel_layout="Et*3|t*5L")


@pytest.mark.parametrize(
    "layout",
    [FOUR, INTERLEAVED, Layout.contiguous([3, 6]), Layout.parse("Et*3|t*5mL", 2), Layout.parse("E|t*8L", 1)],
    ids=["stages", "chunks", "layers", "ends", "virtual"],
)
@pytest.mark.parametrize("wanted", [None, True, False])
def test_a_layout_that_does_not_fit_is_dropped_and_both_are_told(found, layout, wanted):
    args, found.saved = job_args(), saved(layout)
    told = continue_at_saved_layout(args, UNIFORM, wanted=wanted)
    assert args == job_args()
    assert repr(layout.text) in told
    assert told.endswith("which does not fit this run and is dropped: it starts at 'Et*4|t*4L' (2 stages)")


@pytest.mark.parametrize("there", [None, saved(UNIFORM), saved(None)], ids=["no-checkpoint", "the-same", "untold"])
def test_nothing_is_told_where_nothing_differs(found, there):
    args, found.saved = job_args(), there
    assert continue_at_saved_layout(args, UNIFORM, wanted=None) is None
    assert args == job_args()


FLAT = {"optimizer_format": "dp_reshardable"}


@pytest.mark.parametrize(
    ("flags", "run", "there", "finetune", "refused"),
    [
        ({}, UNEVEN, saved(**FLAT), False, None),
        ({}, UNIFORM, saved(**FLAT), False, "--dist-ckpt-optim-fully-reshardable"),
        ({}, FOUR, saved(**FLAT), False, "--dist-ckpt-optim-fully-reshardable"),
        ({}, INTERLEAVED, saved(FOUR, **FLAT), False, "--dist-ckpt-optim-fully-reshardable"),
        ({}, UNIFORM, saved(None, **FLAT), False, "does not tell its layout"),
        ({}, UNIFORM, saved(optimizer_format="dp_zero_gather_scatter"), False, "--no-load-optim"),
        ({}, UNIFORM, saved(optimizer_format="fully_reshardable"), False, None),
        ({}, UNIFORM, saved(optimizer_format="fully_sharded_model_space"), False, None),
        ({}, UNIFORM, saved(), False, None),
        ({}, UNIFORM, saved(**FLAT), True, None),
        ({"no_load_optim": True}, UNIFORM, saved(**FLAT), False, None),
        ({"use_distributed_optimizer": False}, UNIFORM, saved(**FLAT), False, None),
        ({}, UNEVEN, saved(stage_numbering=True), False, None),
        ({}, UNIFORM, saved(stage_numbering=True), False, "--ckpt-format torch_dist"),
        ({"no_load_optim": True}, UNIFORM, saved(stage_numbering=True), True, "--ckpt-format torch_dist"),
    ],
)
def test_what_would_land_in_other_layers_is_refused_and_nothing_else(flags, run, there, finetune, refused):
    told = refusal(job_args(**flags), there, run, finetune=finetune)
    if refused is None:
        assert told is None
        return
    assert refused in told
    assert repr(run.text) in told
    assert "\n" not in told
    if there.layout is not None:
        as_flags = (
            f"--pipeline-model-parallel-size {there.layout.num_stages} --pipeline-model-parallel-layout '{there.layout.text}'"
        )
        assert as_flags in told


def load(args, **options):
    """Call Megatron's load_checkpoint through the row; returns what it was called with, or None."""
    calls = []

    def original(*positional, **named):
        calls.append((positional, named))
        return 7, 0

    assert guard(args).wrap(original)("model", "optimizer", "scheduler", **options) == (7, 0)
    return calls[0]


def test_a_checkpoint_that_may_be_loaded_is(found):
    found.saved = saved(UNIFORM, **FLAT)
    assert load(job_args(), checkpointing_context={}) == (
        ("model", "optimizer", "scheduler", "load"),
        {"checkpointing_context": {}},
    )


@pytest.mark.parametrize("there", [saved(**FLAT), ConfigError("--load saves: the checkpoint cannot be read: torn")])
def test_one_that_must_not_be_ends_the_job_with_one_line_before_it_is_loaded(found, capsys, there):
    found.saved = there
    with pytest.raises(SystemExit) as end:
        load(job_args())
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("megatron_dyn: error: --load saves: the checkpoint ")


def test_where_one_rank_refuses_all_leave(found, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "_gather", lambda view: [view, (view[0], "--load saves: no such file")])
    with pytest.raises(SystemExit):
        load(job_args())
    assert capsys.readouterr().err == "megatron_dyn: error: --load saves: no such file\n"


def test_ranks_that_found_different_layouts_are_told_so(found, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "_gather", lambda view: [view, (UNEVEN.text, None)])
    with pytest.raises(SystemExit):
        load(job_args())
    assert "got 'Et*4|t*4L' on rank 0, 'Et*3|t*5L' on rank 1" in capsys.readouterr().err


def test_all_ranks_of_a_job_are_asked(one_rank):
    assert checkpoint._gather(("Et|tL", None)) == [("Et|tL", None)]


def test_pretrained_weights_are_taken_where_there_is_nothing_to_resume(found, tmp_path):
    args = job_args(load=str(tmp_path), pretrained_checkpoint="pretrained")
    found.saved = saved(**FLAT)
    load(args)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    found.saved = saved(UNIFORM)
    load(args)
    assert found.read == ["pretrained_checkpoint", "load"]


def test_saves_in_flight_are_waited_for(monkeypatch):
    calls = []
    fake = SimpleNamespace(maybe_finalize_async_save=lambda **options: calls.append(options))
    monkeypatch.setitem(sys.modules, "megatron.training.async_utils", fake)
    finish_saves()
    assert calls == [{"blocking": True}]
