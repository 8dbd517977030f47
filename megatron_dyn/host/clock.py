"""Clocks for the recorder: perf_counter where the CPU computes, CUDA events where a GPU does."""

import time

import torch


class PerfCounterClock:
    """Implements ports.Clock for synchronous devices."""

    def mark(self) -> float:
        """See ports.Clock."""
        return time.perf_counter()

    def settle(self) -> None:
        """See ports.Clock; nothing to wait for."""

    def seconds_between(self, start: float, end: float) -> float:
        """See ports.Clock."""
        return end - start


class CudaEventClock:
    """Implements ports.Clock on the current CUDA stream. Marks cost an event each; nothing waits before `settle`."""

    def __init__(self) -> None:
        self._last: torch.cuda.Event | None = None

    def mark(self) -> torch.cuda.Event:
        """See ports.Clock."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._last = event
        return event

    def settle(self) -> None:
        """See ports.Clock."""
        if self._last is not None:
            self._last.synchronize()

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        """See ports.Clock."""
        return start.elapsed_time(end) / 1e3
