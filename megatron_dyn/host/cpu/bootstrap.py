"""The process a rank runs in: environment variables and threads, before torch.distributed exists.

Called by `host.pretrain` on each rank. Groups, sizes and seeds are Megatron's own business: `megatron_rows` sees to it
that it does on CPU what it does on a GPU.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch


def free_port() -> int:
    """Return a TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rank_environment(environ: Mapping[str, str], port: Callable[[], int] = free_port) -> dict[str, str]:
    """Return the variables torch.distributed needs and `environ` lacks: those of a rank that is alone, or none.

    A launcher is recognised by `RANK`. Without one the process is rank 0 of 1 and holds its own store on a free port.
    """
    if "RANK" in environ:
        return {}
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    # A WORLD_SIZE or address left over from an enclosing job would make the lone rank wait for ranks that never come.
    return {name: value for name, value in alone.items() if environ.get(name) != value}


def set_environment(values: Mapping[str, str], stack: ExitStack) -> None:
    """Set variables of this process and put back what was there when `stack` closes."""
    for name, value in values.items():
        before = os.environ.get(name)
        stack.callback(_put_back, name, before)
        os.environ[name] = value


def limit_threads(environ: Mapping[str, str], stack: ExitStack) -> None:
    """Give this rank one thread, until `stack` closes, unless the user set `OMP_NUM_THREADS`.

    Ranks of one machine share its cores; torch would start a thread per core in each, and they would wait for one
    another.
    """
    if "OMP_NUM_THREADS" not in environ:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)


def _put_back(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
