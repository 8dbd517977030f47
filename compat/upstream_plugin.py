"""A pytest plugin that puts megatron_dyn into Megatron's own test run: `-p compat.upstream_plugin --dyn-mode on|off`.

Started by `upstream`. Off is what a job does that installs the plugin and switches it off. On puts in force every row of
the ledger that can be without a running job: those of the loop and of a sampled step, of the norm, and of every platform.
The rows for machines without a GPU stay out: they are there to make other tests than these run.
"""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_dyn.args import add_dyn_args
from megatron_dyn.host.cpu.flags import cpu_arguments
from megatron_dyn.host.rows import HOST_ROWS
from megatron_dyn.host.seams import Seam, apply, is_applied
from megatron_dyn.testing.training import tiny_gpt_arguments

MODES = {"off": "off", "on": "auto"}
"""The value of `--dyn-rebalance` by mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """What was put into this process; leaving `stack` takes it out."""

    mode: str
    rows: tuple[Seam, ...]
    stack: ExitStack


_IN_FORCE = pytest.StashKey[InForce]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Register `--dyn-mode` and `--dyn-record`."""
    group = parser.getgroup("megatron_dyn")
    group.addoption("--dyn-mode", choices=sorted(MODES), required=True)
    group.addoption("--dyn-record", type=Path, required=True, metavar="FILE", help="where to say what was in force")


def pytest_configure(config: pytest.Config) -> None:
    """Install before any test module is imported, so that they get the functions that a job gets."""
    config.stash[_IN_FORCE] = put_in(config.getoption("--dyn-mode"))


def pytest_unconfigure(config: pytest.Config) -> None:
    """Record what is in force after the last test, then take it out."""
    in_force = config.stash[_IN_FORCE]
    import megatron.core

    record = {
        "mode": in_force.mode,
        "rows": [row.target for row in in_force.rows if is_applied(row)],
        "lost": [row.target for row in in_force.rows if not is_applied(row)],
        "megatron": megatron.core.__file__,
    }
    config.getoption("--dyn-record").write_text(json.dumps(record), encoding="utf-8")
    in_force.stack.close()


def put_in(mode: str) -> InForce:
    """Install the plugin in this process as a job with two stages would, in the `mode` given."""
    # Not at the top: it imports Megatron, and pytest has to report it where that fails.
    from megatron_dyn.installer import install

    with ExitStack() as stack:
        arguments = tiny_gpt_arguments(pipeline_model_parallel_size=2, dyn_rebalance=MODES[mode])
        installation = install(validated(cpu_arguments(arguments)[0]))
        stack.callback(installation.undo)
        rows = installation.seams
        if mode == "on":
            more = (*HOST_ROWS, *sampled_rows(), *life_rows())
            stack.enter_context(apply(more))
            rows += more
        return InForce(mode=mode, rows=rows, stack=stack.pop_all())


def validated(words: Sequence[str]) -> Namespace:
    """Return Megatron's validated arguments for a command line, as rank 0 of 2 has them, and leave no trace of it."""
    from megatron.training import arguments

    launched = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with mock.patch.dict(os.environ, launched), mock.patch.object(sys, "argv", ["pytest", *words]):
        args: Namespace = arguments.parse_args(add_dyn_args)
        arguments.validate_args(args, {})
    # Set by the loop that the tests do not enter; a test that calls a single step is step 1.
    args.iteration = args.curr_iteration = 0
    return args


def sampled_rows() -> tuple[Seam, ...]:
    """Return the rows of a sampled step, with a real recorder behind them and a stage that holds no layer."""
    from megatron_dyn.host.clock import PerfCounterClock
    from megatron_dyn.host.hooks import StepProfiler
    from megatron_dyn.measure import Recorder

    recorder = Recorder(PerfCounterClock())
    recorder.begin()
    stage = SimpleNamespace(layers={}, has_embedding=True, has_head=True)
    return StepProfiler(stage, recorder, optimizer=None).seams()


def life_rows() -> tuple[Seam, ...]:
    """Return the rows of the dynamic families, with no family behind them."""
    from megatron_dyn.host.dynamic_life import DynamicLife

    return DynamicLife(Namespace(finetune=True), (), make_job=lambda model, optimizer: None, open_log=None).rows()
