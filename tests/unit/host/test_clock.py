"""Clocks: marks are cheap, and the seconds between them come out right."""

import pytest
import torch

from megatron_dyn.host.clock import CudaEventClock, PerfCounterClock


def test_the_cpu_clock_goes_forward_and_needs_no_settling():
    clock = PerfCounterClock()
    first, second = clock.mark(), clock.mark()
    clock.settle()
    assert clock.seconds_between(first, second) == second - first >= 0
    assert clock.seconds_between(1.0, 3.5) == 2.5


class FakeEvent:
    """Stands for torch.cuda.Event; the stream reaches it when it is synchronised."""

    now_milliseconds = 0.0

    def __init__(self, enable_timing=False):
        assert enable_timing
        self.recorded = None
        self.num_synchronised = 0

    def record(self):
        self.recorded = FakeEvent.now_milliseconds

    def synchronize(self):
        self.num_synchronised += 1

    def elapsed_time(self, end):
        return end.recorded - self.recorded


@pytest.fixture
def events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(FakeEvent, "now_milliseconds", 0.0)


def test_the_gpu_clock_waits_once_and_for_the_newest_mark_only(events):
    clock = CudaEventClock()
    first = clock.mark()
    FakeEvent.now_milliseconds = 250.0
    second = clock.mark()
    assert (first.num_synchronised, second.num_synchronised) == (0, 0)
    clock.settle()
    assert (first.num_synchronised, second.num_synchronised) == (0, 1)
    assert clock.seconds_between(first, second) == 0.25


def test_settling_without_a_mark_waits_for_nothing(events):
    CudaEventClock().settle()
