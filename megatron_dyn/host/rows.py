"""Ledger rows that the entry needs on every platform, GPU machines included.

Put in force by `host.pretrain`.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from megatron_dyn.host.seams import Seam


def _compile_unless_present(original: Callable[[], None]) -> Callable[[], None]:
    @functools.wraps(original)
    def compile_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            original()

    return compile_helpers


HOST_ROWS: tuple[Seam, ...] = (
    Seam(
        target="megatron.core.datasets.utils:compile_helpers",
        why="it runs make in the installed package; the wheel has the compiled helper but no Makefile: exit 1",
        remove_when="Megatron runs make only where its helper cannot be imported",
        wrap=_compile_unless_present,
    ),
)
