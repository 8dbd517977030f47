"""A simulated step as a trace that Perfetto and chrome://tracing open: one track a stage. Knows no plans, only a run."""

import json
from collections.abc import Iterator
from typing import Any

from megatron_dyn.cli.output import write_file
from megatron_dyn.plan.pipeline.simulator import PipelineRun

_MICROSECONDS = 1e6


def write_trace(path: str, run: PipelineRun, title: str) -> None:
    """Write `run` to `path`; raises InputError naming `--trace`."""
    write_file("--trace", path, json.dumps(trace_of(run, title)))


def trace_of(run: PipelineRun, title: str) -> dict[str, Any]:
    """The trace as plain data, in the JSON object form of the Trace Event Format; times are microseconds."""
    return {"traceEvents": [*_tracks(run, title), *_slices(run)], "displayTimeUnit": "ms"}


def _tracks(run: PipelineRun, title: str) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "tid": 0, "name": "process_name", "args": {"name": title}}
    for pp_rank in range(len(run.spans)):
        yield {"ph": "M", "pid": 0, "tid": pp_rank, "name": "thread_name", "args": {"name": f"stage {pp_rank}"}}
        yield {"ph": "M", "pid": 0, "tid": pp_rank, "name": "thread_sort_index", "args": {"sort_index": pp_rank}}


def _slices(run: PipelineRun) -> Iterator[dict[str, Any]]:
    for of_stage in run.spans:
        for span in of_stage:
            yield {
                "ph": "X",
                "pid": 0,
                "tid": span.pp_rank,
                "name": f"{span.phase.value} {span.microbatch}",
                "cat": span.phase.value,
                "ts": span.start_seconds * _MICROSECONDS,
                "dur": (span.end_seconds - span.start_seconds) * _MICROSECONDS,
                "args": {"chunk": span.chunk, "microbatch": span.microbatch},
            }
