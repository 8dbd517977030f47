"""The trace has every operation of the step, on the track of its stage, at its time."""

import json

import pytest

from megatron_dyn.cli.chrome_trace import trace_of, write_trace
from megatron_dyn.cli.errors import InputError
from megatron_dyn.plan.pipeline.simulator import simulate_pipeline
from megatron_dyn.plan.workload import ChunkTimes

TIMES = ChunkTimes(
    num_stages=2, forward_seconds=(1.0, 2.0), backward_seconds=(2.0, 4.0), p2p_seconds=(0.0,), optimizer_seconds=(0.0, 0.0)
)


def test_every_operation_is_a_slice_on_the_track_of_its_stage():
    run = simulate_pipeline(TIMES, 3)
    events = trace_of(run, "a title")["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1"}
    assert events[0]["args"] == {"name": "a title"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 12
    assert {event["tid"] for event in slices} == {0, 1}
    assert sum(event["dur"] for event in slices if event["tid"] == 1) == pytest.approx(18e6)
    last = max(slices, key=lambda event: event["ts"])
    assert (last["name"], last["cat"], last["args"]) == ("backward 2", "backward", {"chunk": 0, "microbatch": 2})
    assert last["ts"] + last["dur"] == pytest.approx(run.pipeline_seconds * 1e6)


def test_a_file_of_json_is_written_or_refused_with_its_flag(tmp_path):
    run = simulate_pipeline(TIMES, 1)
    write_trace(str(tmp_path / "trace.json"), run, "x")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace_of(run, "x")
    with pytest.raises(InputError, match="--trace"):
        write_trace(str(tmp_path), run, "x")
