"""The Megatron flags that a machine without GPU, Transformer Engine and Apex needs, added where they are missing.

Pure functions over lists of strings; `host.pretrain` calls them before Megatron parses. They must not know torch or
Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CpuFlag:
    """One flag of Megatron and why the CPU platform cannot do without it."""

    flag: str
    """Spelling on the command line."""
    value: str | None = None
    """Its value; None for a switch."""
    why: str
    """What goes wrong without it."""
    only_with: str | None = None
    """Add the flag only where this other flag is on the command line."""

    @property
    def words(self) -> tuple[str, ...]:
        """The flag as it is appended to a command line."""
        return (self.flag,) if self.value is None else (self.flag, self.value)


CPU_FLAGS: tuple[CpuFlag, ...] = (
    CpuFlag(flag="--transformer-impl", value="local", why="the default implementation is Transformer Engine"),
    CpuFlag(flag="--distributed-backend", value="gloo", why="the default, nccl, needs a GPU"),
    CpuFlag(flag="--no-persist-layer-norm", why="the persistent kernel is Apex's"),
    CpuFlag(flag="--no-gradient-accumulation-fusion", why="the fused kernel is Apex's or Transformer Engine's"),
    CpuFlag(flag="--no-masked-softmax-fusion", why="the fused kernel is Apex's"),
    CpuFlag(flag="--no-rope-fusion", why="the fused kernel is Transformer Engine's"),
    CpuFlag(
        flag="--disable-bias-linear",
        why="the experts' biases are added in place to a view, which autograd refuses",
        only_with="--num-experts",
    ),
    CpuFlag(
        flag="--async-strategy",
        value="mcore",
        why="the default, nvrx, needs nvidia-resiliency-ext, whose writer needs a GPU",
        only_with="--async-save",
    ),
)


def has_flag(argv: Sequence[str], flag: str) -> bool:
    """Return whether `flag` is on the command line, as `--flag value`, `--flag=value` or a bare switch."""
    return any(word == flag or word.startswith(f"{flag}=") for word in argv)


def cpu_arguments(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the command line with the missing flags of `CPU_FLAGS` appended, and one line that says which (or None).

    A flag that is there already keeps its value, also where that cannot work: the user's wish then meets Megatron's own
    error.
    """
    added: list[str] = []
    for row in CPU_FLAGS:
        if not has_flag(argv, row.flag) and (row.only_with is None or has_flag(argv, row.only_with)):
            added.extend(row.words)
    notice = f"dynamic balancing: training on CPU, so these flags were added: {' '.join(added)}" if added else None
    return [*argv, *added], notice
