"""How much memory a move takes beyond what was in use before it, at its peak: seen, not reckoned."""

from pathlib import Path

import torch

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"
"""What makes Linux start the peak of a process's resident memory anew (man 5 proc_pid_clear_refs)."""


class PeakMemory:
    """Implements ports.PeakMemory: the CUDA allocator's counter on a GPU, the resident set of the process on a CPU."""

    def __init__(self, device: torch.device) -> None:
        """`device` is where the model lives."""
        self._device = device
        self._before: int | None = None

    def start(self) -> None:
        """See ports.PeakMemory."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
            return
        try:
            _CLEAR.write_text(_RESET_PEAK)
            self._before = _resident("VmRSS")
        except OSError:
            # Another operating system, or a sandbox that hides /proc: not known is better than guessed.
            self._before = None

    def stop(self) -> int | None:
        """See ports.PeakMemory."""
        if self._before is None:
            return None
        on_gpu = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if on_gpu else _resident("VmHWM")
        return max(0, peak - self._before)


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{_STATUS} has no {field}")
