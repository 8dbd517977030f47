"""The platform as a whole: what torch answers while it is in force, and that nothing is left afterwards."""

import os

import pytest
import torch

from megatron_dyn.host.compat import resolve
from megatron_dyn.host.cpu import CPU_ROWS, activate
from megatron_dyn.testing.ranks import run_ranks


def stored(target):
    owner, name = resolve(target)
    return vars(owner).get(name)


def in_force_and_undone():
    before = {row.target: stored(row.target) for row in CPU_ROWS}
    threads, connections = torch.get_num_threads(), os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    undo = activate()
    answers = answers_of_torch()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    again = activate()
    again()
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    undo()
    undo()
    assert [row.target for row in CPU_ROWS if stored(row.target) is not before[row.target]] == []
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert torch.get_num_threads() == threads
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    return answers, connections


def answers_of_torch():
    stream, start, end = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(stream), torch.cuda.device(0):
        start.record()
        stream.wait_event(start)
        stream.record_event(end)
        torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()
    ones = torch.ones(2)
    return {
        "elapsed": start.elapsed_time(end) >= 0,
        "queries": (stream.query(), end.query()),
        "device": torch.zeros(2, device=torch.cuda.current_device()).device.type,
        "moved": ones.cuda().pin_memory() is ones,
        "module": next(torch.nn.Linear(1, 1).cuda().parameters()).device.type,
        "types": (ones.type(), ones.bfloat16().type(), ones.type("torch.cuda.IntTensor").dtype),
        "memory": (torch.cuda.memory_allocated(), torch.cuda.max_memory_reserved(), torch.cuda.memory_stats()),
        "capability": (torch.cuda.get_device_capability(), torch.cuda.get_device_properties(0).major),
        "available": torch.cuda.is_available(),
        "classes": (isinstance(stream, torch.cuda.Stream), isinstance(start, torch.cuda.Event)),
    }


def test_torch_answers_as_if_the_cpu_were_the_device_and_nothing_is_left():
    ((answers, _),) = run_ranks(in_force_and_undone, 1)
    assert answers == {
        "elapsed": True,
        "queries": (True, True),
        "device": "cpu",
        "moved": True,
        "module": "cpu",
        "types": ("torch.cuda.FloatTensor", "torch.cuda.BFloat16Tensor", torch.int32),
        "memory": (0, 0, {}),
        "capability": ((0, 0), 0),
        "available": False,
        "classes": (True, True),
    }


def draws_of_the_tracker():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with activate():
        torch.cuda.manual_seed(1)
        start = torch.cuda.get_rng_state()
        tracker = CudaRNGStatesTracker()
        tracker.add("a", 2)
        tracker.add("b", 3)
        untouched = torch.equal(torch.cuda.get_rng_state(), start)
        draws = []
        for name in ("a", "b", "a"):
            with tracker.fork(name):
                draws.append(torch.rand(2, device="cuda").tolist())
        draws.append(torch.rand(2, device="cuda").tolist())
        torch.cuda.set_rng_state(start)
        draws.append(torch.rand(2).tolist())
    return untouched, draws


def test_the_rng_tracker_forks_the_generator_that_dropout_draws_from():
    ((untouched, (first_a, first_b, second_a, default, default_again)),) = run_ranks(draws_of_the_tracker, 1)
    torch_draws = {}
    for seed in (1, 2, 3):
        generator = torch.Generator().manual_seed(seed)
        torch_draws[seed] = [torch.rand(2, generator=generator).tolist() for _ in range(2)]
    assert untouched
    assert [first_a, second_a] == torch_draws[2]
    assert first_b == torch_draws[3][0]
    assert default == default_again == torch_draws[1][0]


def test_every_row_says_why_and_until_when():
    assert all(row.why and row.remove_when for row in CPU_ROWS)
    assert len({row.target for row in CPU_ROWS}) == len(CPU_ROWS)
