"""Ledger row for gloo: one worker a group.

Put in force by `host.cpu.activate`; must not know Megatron.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo

from megatron_dyn.host.seams import Seam


def _with_one_worker(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(
        self: Any, store: Any, rank: int, size: int, options: Any = None, *, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        if options is None:
            options = ProcessGroupGloo._Options()
            interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
            options._devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces] or [
                ProcessGroupGloo.create_default_device()
            ]
            options._timeout = timeout
        options._threads = 1
        original(self, store, rank, size, options)

    return init


GLOO_ROWS: tuple[Seam, ...] = (
    Seam(
        target="torch.distributed.distributed_c10d:ProcessGroupGloo.__init__",
        why="with two workers a group, collectives under way at once corrupt the heap now and then (torch 2.13, overlapped "
        "gradient reduction with virtual stages: three of about twenty runs on busy cores ended in an abort of malloc)",
        remove_when="collectives of one gloo group can be under way at once",
        wrap=_with_one_worker,
    ),
)
