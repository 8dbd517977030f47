"""Rebuild: vote, detach, attach, optimizer, gradient buffers. Pure order of steps; the host supplies the steps."""

from megatron_dyn.rebuild.sequence import RebuildError, rebuild

__all__ = ["RebuildError", "rebuild"]
