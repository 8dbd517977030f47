"""The rows for asynchronous checkpoints: a forked writer, and copies that later steps do not change."""

import torch
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from megatron_dyn.host.cpu.async_rows import ASYNC_ROWS

FORK, SNAPSHOT = (row.wrap for row in ASYNC_ROWS)


def test_the_writer_is_forked_whatever_megatron_asks_for():
    calls = []
    FORK(lambda *args: calls.append(args))(3, "forkserver")
    assert calls == [(3, "fork")]


def test_what_is_written_is_what_was_there_when_the_save_was_scheduled():
    scheduled = []
    weight = torch.zeros(3, requires_grad=True)
    buckets = [("a.distcp", "a", ([("args", b"text")], [("weight", weight)]))]
    request = AsyncRequest(print, [1, buckets, "results"], [], preload_fn=lambda: buckets)
    SNAPSHOT(scheduled.append)(request)
    weight.data += 1
    (sent,) = scheduled
    rank, ((path, name, (texts, [(item, tensor)])),), results = sent.async_fn_args
    assert (rank, path, name, texts, item, results) == (1, "a.distcp", "a", [("args", b"text")], "weight", "results")
    assert tensor.tolist() == [0, 0, 0]
    assert not tensor.requires_grad
    assert sent.preload_fn is None
    assert sent.finalize_fns is request.finalize_fns


def test_a_rank_with_nothing_to_write_schedules_that():
    scheduled = []
    request = AsyncRequest(None, [], [])
    SNAPSHOT(scheduled.append)(request)
    assert scheduled == [request]
