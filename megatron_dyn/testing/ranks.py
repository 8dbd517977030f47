"""Runs a function on several ranks of this machine, started from one warm parent; brings back results or the failure.

Importing Megatron takes seconds; the ranks fork from a server process that has done it. Each rank's output goes to a
file. It must not know what the ranks do: `testing.training` builds on it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, Literal, overload

from megatron_dyn.host.cpu.bootstrap import free_port

PRELOAD = ("torch", "megatron.training.training", "megatron_dyn.testing.warm")
"""Modules the server imports once, before the first rank forks."""

GRACE_SECONDS = 5.0
"""How long the other ranks may take to end by themselves after one has failed."""

TAIL_LINES = 40
"""Lines of a failed rank's output that go into the error."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """How one rank ended."""

    rank: int
    """Its global rank."""
    exitcode: int
    """Exit code of the process; negative for the signal that killed it."""
    output: str
    """What it wrote to stdout and stderr."""
    value: Any = None
    """What the function returned; None where it did not return."""
    error: str | None = None
    """Traceback of the exception that ended the function; None where there was none."""
    ended_seconds: float = 0.0
    """Wall-clock time at which the function ended, in seconds of the epoch; 0.0 where the process died in it."""


class RankFailure(AssertionError):
    """A rank failed or did not end in time; the message holds rank, exit code, traceback and the end of its output."""

    def __init__(self, reason: str, results: Sequence[RankResult], rank: int) -> None:
        """Describe the failure of `rank`, one of `results`; `reason` comes first in the message."""
        result = results[rank]
        tail = "\n".join(result.output.splitlines()[-TAIL_LINES:])
        # The traceback comes last: it is what a reader of a long test log sees first.
        super().__init__(f"rank {rank} {reason}; the end of its output:\n{tail}\n{result.error or ''}")
        self.rank = rank
        self.results = list(results)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """All that a rank needs to know, in picklable form."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    rank: int
    environment: dict[str, str]
    cwd: str | None
    folder: str


@overload
def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = ...,
    cwd: str | os.PathLike[str] | None = ...,
    environment: Mapping[str, str] | None = ...,
    expect_exit: Literal[False] = ...,
) -> list[Any]: ...
@overload
def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = ...,
    cwd: str | os.PathLike[str] | None = ...,
    environment: Mapping[str, str] | None = ...,
    expect_exit: Literal[True],
) -> list[RankResult]: ...
def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    expect_exit: bool = False,
) -> list[Any] | list[RankResult]:
    """Call `fn(*args)` on `world_size` ranks of this machine at once and return what each returned, by rank.

    `fn` and its arguments must be picklable, `fn` by the name of an importable module. Each rank finds the variables a
    launcher sets, with a free port of its own, plus `environment`, and starts in `cwd`. Nothing is initialised for it.
    Where a rank raises, exits or dies, the others get `GRACE_SECONDS` to end and are killed. Raises `RankFailure` for
    the rank that failed first. With `expect_exit` it waits for every rank to end in its own way, and returns a
    `RankResult` of each instead. Either way it raises `RankFailure`, with all ranks killed, after `timeout_seconds`.
    """
    shared = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        jobs = [
            _Job(
                function=fn,
                args=args,
                rank=rank,
                environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank), **(environment or {})},
                cwd=None if cwd is None else os.fspath(cwd),
                folder=folder,
            )
            for rank in range(world_size)
        ]
        results, killed, timed_out = _run(jobs, timeout_seconds, stop_on_failure=not expect_exit)
    if timed_out:
        raise RankFailure(f"did not end within {timeout_seconds} s (ranks still running: {killed})", results, killed[0])
    if expect_exit:
        return results
    failed = [result for result in results if result.exitcode != 0 and result.rank not in killed]
    if failed:
        # One that died without a word, at 0.0, is the cause of the broken connections its peers report.
        first = min(failed, key=lambda result: result.ended_seconds)
        raise RankFailure(f"failed with exit code {first.exitcode}", results, first.rank)
    return [result.value for result in results]


def _run(jobs: Sequence[_Job], timeout_seconds: float, stop_on_failure: bool) -> tuple[list[RankResult], list[int], bool]:
    """Start the jobs, wait for them, and return their results, the ranks we had to kill, and whether time ran out."""
    context = _context()
    processes = [context.Process(target=_rank_main, args=(job,), daemon=False) for job in jobs]
    timed_out, killed = False, []
    try:
        for process in processes:
            process.start()
        timed_out = _wait_for(processes, timeout_seconds, stop_on_failure)
    finally:
        killed = [rank for rank, process in enumerate(processes) if process.pid is not None and process.is_alive()]
        for process in processes:
            _kill(process)
    return [_result_of(job, process) for job, process in zip(jobs, processes, strict=True)], killed, timed_out


def _wait_for(processes: Sequence[ForkServerProcess], timeout_seconds: float, stop_on_failure: bool) -> bool:
    """Wait until all have ended, or one has failed and its peers had their grace; return True where time ran out."""
    deadline = time.monotonic() + timeout_seconds
    stopping = False
    while running := [process for process in processes if process.is_alive()]:
        if stop_on_failure and not stopping and any(process.exitcode for process in processes):
            stopping = True
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            return not stopping
        wait([process.sentinel for process in running], timeout=left_seconds)
    return False


def _kill(process: ForkServerProcess) -> None:
    """End a rank, if it has not ended, and every process it left behind: data loaders, writers of checkpoints."""
    if process.pid is None:
        return
    try:
        # The rank leads a process group, which outlives it for as long as it has a member.
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # Too young to lead a group, or the whole group has ended.
        process.kill()
    process.join()


def _result_of(job: _Job, process: ForkServerProcess) -> RankResult:
    exitcode = -signal.SIGKILL if process.exitcode is None else process.exitcode
    output_path, outcome_path = _output_path(job), _outcome_path(job)
    output = output_path.read_text(encoding="utf-8", errors="replace") if output_path.exists() else ""
    outcome = pickle.loads(outcome_path.read_bytes()) if outcome_path.exists() else {}
    return RankResult(rank=job.rank, exitcode=exitcode, output=output, **outcome)


def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    # Libraries that size their thread pools when they are loaded do so in the server, with its environment.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context.set_forkserver_preload(list(PRELOAD))
    return context


def _rank_main(job: _Job) -> None:
    """Body of a rank's process: take over output and environment, call the function, leave the outcome in a file."""
    os.setsid()
    _redirect_output(job)
    # The server's way of starting processes is inherited; data loaders and checkpoint writers expect the usual one.
    multiprocessing.set_start_method(None, force=True)
    os.environ.update(job.environment)
    if job.cwd is not None:
        os.chdir(job.cwd)
    outcome: dict[str, Any] = {}
    try:
        outcome["value"] = job.function(*job.args)
        exitcode = 0
    except SystemExit as error:
        exitcode = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - whatever it was, the parent has to hear of it
        outcome["error"] = traceback.format_exc()
        exitcode = 1
    outcome["ended_seconds"] = time.time()
    sys.stdout.flush()
    sys.stderr.flush()
    # Complete or not there at all: a rank may be killed while it writes.
    partial_path = _outcome_path(job).with_suffix(".partial")
    partial_path.write_bytes(pickle.dumps(outcome))
    partial_path.rename(_outcome_path(job))
    # Not through the interpreter's end: threads of a broken communicator could hold it up for minutes.
    os._exit(exitcode)


def _redirect_output(job: _Job) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(_output_path(job), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    # The server may have no usable streams of its own (pytest replaces them).
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", buffering=1, closefd=False)


def _output_path(job: _Job) -> Path:
    return Path(job.folder) / f"rank{job.rank}.output"


def _outcome_path(job: _Job) -> Path:
    return Path(job.folder) / f"rank{job.rank}.outcome"
