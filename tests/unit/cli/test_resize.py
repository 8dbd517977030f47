"""Dry runs of resizes, and the maths of batches (case C10)."""

import pytest

from megatron_dyn.cli.resize import Batch, Grid, Point, dry_run, micro_batch_size, read_grids, read_points, released_nodes
from megatron_dyn.config import ConfigError
from megatron_dyn.records import Layout

BATCH = Batch(global_batch=64, micro_sizes=(4, 8))
GRIDS = read_grids("8->(4,1,2),4->(2,1,2)")


def even(grid, num_microbatches):
    return Layout.contiguous([8 // grid.pp] * grid.pp)


def rows_of(points, grids=GRIDS, batch=BATCH):
    return dry_run(read_points(points), grids, batch, even)


@pytest.mark.parametrize(
    "text",
    [
        '[{"step": 0, "size": 8}, {"step": 100, "size": 4}, {"step": 200, "size": 0}]',
        "[{step0,size8},{step100,size4},{step200,size0}]",
        "{step 0, size 8}, {step=100, size=4}, {step:200, size:0}",
    ],
)
def test_traces_of_sizes_are_read_in_every_form(text):
    assert read_points(text) == (Point(step=0, size=8), Point(step=100, size=4), Point(step=200, size=0))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "expected at least one entry"),
        ("[{step0,size8},{step0,size4}]", "expected ascending steps, got 0 after 0"),
        ("[{step0,size0},{step5,size4}]", r"step 5: the job stopped at step 0 \(size 0\)"),
        ("[{step0,size8},{step5}]", r"entry 1: expected a step and a size.*got '\{step5\}'"),
        ("[{step0,size-8}]", "entry 0"),
        (f"[{{step0,size{'9' * 5000}}}]", "entry 0"),
        ("[{step0,size\u0668}]", "entry 0"),
        ("nonsense", "entry 0"),
    ],
)
def test_bad_traces_of_sizes_are_refused(text, told):
    with pytest.raises(ConfigError, match=f"^--resize: {told}"):
        read_points(text)


@pytest.mark.parametrize(
    "text",
    [
        '{"8": [4, 1, 2], "4": [2, 1, 2]}',
        "8->(4,1,2),4->(2,1,2)",
        "8=4x1x2 4=2x1x2",
        "8:(4,1); 4:(2,1)",
        "8->(4,1,2), 4->(2,1)",
    ],
)
def test_maps_of_sizes_are_read_in_every_form(text):
    assert read_grids(text) == {8: Grid(pp=4, tp=1, dp=2), 4: Grid(pp=2, tp=1, dp=2)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("6->(4,1,2)", r"size 6: expected a multiple of pp \* tp = 4 \* 1 = 4"),
        ("8->(4,1,1)", r"size 8: expected pp \* tp \* dp = 8, got 4 \* 1 \* 1 = 4"),
        ("8->(0,1,1)", "size 8: expected a multiple"),
        ("8->(4,1,2),8->(2,1,4)", "size 8 is given twice"),
        ("8", "expected entries such as"),
        (f"8->({'9' * 5000},1)", "expected entries such as"),
        ("200000->(1,1)", "size 200000: expected at most 131072 GPUs and 16384 stages, got pp 1"),
        ("20000->(20000,1)", "size 20000: expected at most 131072 GPUs and 16384 stages, got pp 20000"),
        ("", "expected entries such as"),
    ],
)
def test_bad_maps_of_sizes_are_refused(text, told):
    with pytest.raises(ConfigError, match=f"^--sizes: {told}"):
        read_grids(text)


@pytest.mark.parametrize(
    ("model_parallel", "sizes", "expected"),
    [(1, (4, 8), 4), (2, (4, 8), 8), (4, (4, 8), 8), (2, (8,), 8), (4, (8,), 8)],
)
def test_c10_the_batch_is_shared_by_replicas_not_by_gpus(model_parallel, sizes, expected):
    batch = Batch(global_batch=64, micro_sizes=sizes)
    assert micro_batch_size(batch, num_gpus=16, model_parallel=model_parallel) == expected


@pytest.mark.parametrize(
    ("global_batch", "sizes", "num_gpus", "model_parallel", "told"),
    [
        (64, (8,), 16, 1, r"size 16: expected a micro-batch that divides 4, .*64, got \[8\]"),
        (60, (1,), 16, 2, "size 16: global batch 60 is no multiple of 8 data-parallel ranks"),
        (64, (1,), 6, 4, r"size 6: expected a multiple of the 4 GPUs of a replica"),
    ],
)
def test_batches_that_do_not_divide_are_refused(global_batch, sizes, num_gpus, model_parallel, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        micro_batch_size(Batch(global_batch=global_batch, micro_sizes=sizes), num_gpus=num_gpus, model_parallel=model_parallel)


def test_c10_shrink_then_stop():
    start, shrunk, stopped = rows_of("[{step0,size8},{step100,size4},{step200,size0}]")
    assert (start.kept, start.released, start.moved_layers) == (range(8), range(8, 8), ())
    assert (shrunk.kept, list(shrunk.released)) == (range(4), [4, 5, 6, 7])
    # Ranks 0-1 held layers 0-1 and now need 0-3, ranks 2-3 held 2-3 and now need 4-7.
    assert shrunk.moved_layers == (2, 3, 4, 5, 6, 7)
    assert (stopped.grid, list(stopped.released), stopped.moved_layers) == (None, [0, 1, 2, 3], ())
    for row in (start, shrunk):
        assert row.num_microbatches * row.micro_batch * row.grid.dp == 64


def test_growing_joins_ranks_and_gives_them_their_layers():
    _, grown = rows_of("[{step0,size4},{step100,size8}]")
    assert (grown.kept, grown.released, list(grown.joined)) == (range(4), range(8, 8), [4, 5, 6, 7])
    # Ranks 0-1 keep 0-1, ranks 2-3 get 2-3, the new ones 4-7.
    assert grown.moved_layers == (2, 3, 4, 5, 6, 7)


def test_a_size_that_stays_moves_nothing_and_another_tensor_parallelism_moves_all():
    assert rows_of("[{step0,size8},{step9,size8}]")[1].moved_layers == ()
    assert rows_of("[{step0,size8},{step9,size4}]", read_grids("8->(2,2,2),4->(2,1,2)"))[1].moved_layers == tuple(range(8))
    # Fewer replicas alone: the first stage's first replica keeps its layers, the second stage's ranks shift.
    halved = rows_of("[{step0,size8},{step9,size4}]", read_grids("8->(2,1,4),4->(2,1,2)"))[1]
    assert halved.moved_layers == (4, 5, 6, 7)


def test_a_size_that_is_not_in_the_map_is_named():
    with pytest.raises(ConfigError, match=r"^--resize: step 100: size 6 is not in --sizes, which has 4, 8$"):
        rows_of("[{step0,size8},{step100,size6}]")


def test_only_whole_nodes_are_free():
    start, shrunk, stopped = rows_of("[{step0,size8},{step100,size4},{step200,size0}]")
    assert list(released_nodes(start, 2)) == []
    assert list(released_nodes(shrunk, 2)) == [2, 3]
    # The first node of 3 is full, the second keeps rank 3.
    assert list(released_nodes(shrunk, 3)) == [2]
    assert list(released_nodes(stopped, 3)) == [0, 1]


def test_more_micro_batches_than_can_be_planned_for_are_refused():
    with pytest.raises(ConfigError, match=r"^size 4: expected at most 65536 micro-batches, got 65537$"):
        rows_of("[{step0,size4}]", batch=Batch(global_batch=65537 * 2, micro_sizes=(1,)))
