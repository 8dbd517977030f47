"""Ports: what stands in for them, real or fake, takes the same calls."""

import inspect

import pytest

from megatron_dyn import controller, ports
from megatron_dyn.host.clock import CudaEventClock, PerfCounterClock
from megatron_dyn.host.collective import GlooCollective
from megatron_dyn.host.dynamic_job import MegatronJob
from megatron_dyn.host.memory import PeakMemory
from megatron_dyn.host.profiler import MegatronProfiler
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.migrate import MemoryTransport, ProcessGroupTransport, Source
from megatron_dyn.migrate.transport import Mailbox
from megatron_dyn.report import JsonlSink, TableSink
from megatron_dyn.testing.dynamics import FakeJob, RecordingDynamic
from megatron_dyn.testing.fakes import FakeClock, FakePeakMemory, FakeProfiler, MemoryStore, RecordingSink
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox, ThreadWorld

IMPLEMENTATIONS = [
    (ports.Clock, FakeClock),
    (ports.Clock, PerfCounterClock),
    (ports.Clock, CudaEventClock),
    (ports.Collective, ThreadCollective),
    (ports.Collective, GlooCollective),
    (ports.Transport, MemoryTransport),
    (ports.Transport, ProcessGroupTransport),
    (Mailbox, ThreadMailbox),
    (ports.LayerStore, MemoryStore),
    (ports.LayerStore, MegatronLayerStore),
    (Source, MemoryStore),
    (Source, MegatronLayerStore),
    (ports.PeakMemory, FakePeakMemory),
    (ports.PeakMemory, PeakMemory),
    (ports.Sink, RecordingSink),
    (ports.Sink, JsonlSink),
    (ports.Sink, TableSink),
    (ports.Job, FakeJob),
    (ports.Job, MegatronJob),
    (ports.Dynamic, RecordingDynamic),
    (controller.Profiler, FakeProfiler),
    (controller.Profiler, MegatronProfiler),
]


def members(protocol):
    """The public methods and properties that a Protocol asks for."""
    asked = {name: value for name, value in vars(protocol).items() if not name.startswith("_")}
    return {name: value for name, value in asked.items() if callable(value) or isinstance(value, property)}


def misfits(protocol, implementation):
    """What the class lacks, and methods whose parameters differ in name, kind or order."""
    found = []
    for name, wanted in members(protocol).items():
        given = inspect.getattr_static(implementation, name, None)
        if isinstance(wanted, property):
            if not isinstance(given, property):
                found.append(name)
        elif given is None or call_of(given) != call_of(wanted):
            found.append(name)
    return found


def call_of(function):
    return [(parameter.name, parameter.kind) for parameter in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("protocol", "implementation"), IMPLEMENTATIONS, ids=[kind.__name__ for _, kind in IMPLEMENTATIONS])
def test_implementations_take_the_calls_of_their_port(protocol, implementation):
    assert members(protocol)
    assert misfits(protocol, implementation) == []


def test_every_port_has_a_shipped_fake():
    asked = {value for value in vars(ports).values() if getattr(value, "_is_protocol", False)} - {ports.Protocol}
    faked = {protocol for protocol, kind in IMPLEMENTATIONS if kind.__module__.startswith("megatron_dyn.testing")}
    # The in-memory transport is shipped where the transports are.
    assert asked - faked == {ports.Transport}


def test_the_fakes_satisfy_the_protocols_that_can_be_checked_at_run_time():
    world = ThreadWorld(1)
    assert isinstance(FakeClock(), ports.Clock)
    assert isinstance(ThreadCollective(world, 0), ports.Collective)
    assert isinstance(MemoryTransport(0, ThreadMailbox()), ports.Transport)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("pass", ["settle", "seconds_between", "mark"]),
        ("def mark(self, now): ...", ["mark", "settle", "seconds_between"]),
        ("def mark(self): ...", ["settle", "seconds_between"]),
    ],
)
def test_the_check_can_fail(body, expected):
    namespace = {}
    exec(f"class Planted:\n    {body}", namespace)
    assert sorted(misfits(ports.Clock, namespace["Planted"])) == sorted(expected)


def test_what_ends_a_job_can_be_caught_as_one():
    assert issubclass(ports.CollectiveTimeout, ports.JobError)
    assert issubclass(ports.JobError, RuntimeError)
