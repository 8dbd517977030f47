"""A job without a model for the tests of the controller: threads as ranks, costs that change on command, no sleeping."""

from functools import partial

import torch

from megatron_dyn.config import DecideConfig, DynConfig, ForcedLayout, MeasureConfig, RebalancePolicy
from megatron_dyn.controller import Controller, Crew
from megatron_dyn.migrate import MemoryTransport, Seat
from megatron_dyn.records import Layout, Outcome
from megatron_dyn.testing.fakes import FakePeakMemory, FakeProfiler, MemoryStore, RecordingSink
from megatron_dyn.testing.faults import Faults
from megatron_dyn.testing.threads import ThreadCollective, ThreadMailbox, ThreadWorld

NUM_MICROBATCHES = 4
LIGHT, HEAVY = 0.01, 0.05


def uniform(step, layer):
    return LIGHT


def heavy_last_layer(step, layer, *, layer_id=7, since=0):
    return HEAVY if layer == layer_id and step >= since else LIGHT


def config_of(rebalance="off", *, interval=2, window=3, warmup=2, cooldown=5, forced=None, **more):
    return DynConfig(
        rebalance=RebalancePolicy.parse(rebalance),
        layout_at=tuple(ForcedLayout(iteration=at, text=text) for at, text in (forced or {}).items()),
        measure=MeasureConfig(interval_steps=interval, window_samples=window, warmup_steps=warmup),
        decide=DecideConfig(cooldown_steps=cooldown),
        **more,
    )


class HookedProfiler(FakeProfiler):
    """Also tells whether its hooks are in, and how often a step was given up."""

    running = False
    num_cancelled = 0

    def start(self):
        super().start()
        self.running = True

    def stop(self, iteration):
        self.running = False
        return super().stop(iteration)

    def cancel(self):
        super().cancel()
        self.running = False
        self.num_cancelled += 1


class Job:
    """A run without a model: one rank and one thread a stage; a step takes what the layer costs of its layout say.

    A sampled step takes `hook_seconds` longer. `more_sinks` are written to before the sink that records.
    """

    def __init__(self, config, *, counts=(4, 4), costs=uniform, faults=None, last_step=400, hook_seconds=0.0, more_sinks=()):
        self.config, self.costs, self.last_step, self.hook_seconds = config, costs, last_step, hook_seconds
        self.layout = Layout.contiguous(counts)
        self.world = ThreadWorld(self.layout.num_stages)
        faults = faults or Faults()
        self.mailbox = ThreadMailbox(faults=faults)
        ranks = tuple(range(self.world.size))
        self.stores = [MemoryStore(rank, self.layout.layers_of_stage(rank), faults=faults) for rank in ranks]
        self.seats = [Seat(global_rank=rank, pp_rank=rank, pipeline_ranks=ranks, device=torch.device("cpu")) for rank in ranks]
        self.profilers = [HookedProfiler(store, seat, costs) for store, seat in zip(self.stores, self.seats, strict=True)]
        self.memories = [FakePeakMemory(1000 * rank) for rank in ranks]
        self.sink = RecordingSink()
        self.sinks = (*more_sinks, self.sink)
        self.forced = config.forced_layouts(built=self.layout)
        self.controllers = [self.controller(rank) for rank in ranks]
        self.trace = [[] for _ in ranks]
        self.told_at = ()
        """Boundaries at which every controller is told that costs have changed."""

    def controller(self, rank, forced=None):
        crew = Crew(
            collective=ThreadCollective(self.world, rank),
            transport=MemoryTransport(rank, self.mailbox),
            store=self.stores[rank],
            seat=self.seats[rank],
            source=self.stores[rank],
            profiler=self.profilers[rank],
            memory=self.memories[rank],
            sinks=self.sinks if rank == 0 else (),
        )
        return Controller(
            self.config,
            crew,
            layout=self.layout,
            forced=self.forced if forced is None else forced,
            last_step=self.last_step,
            tokens_per_step=1000,
        )

    def step_seconds(self, step, layout):
        """What a step takes that is not sampled."""
        busy = [
            sum(self.costs(step, layer) for layer in layout.layers_of_stage(pp_rank)) for pp_rank in range(layout.num_stages)
        ]
        return max(busy) * (NUM_MICROBATCHES + len(busy) - 1)

    def train(self, rank, steps, *, close=True):
        controller = self.controllers[rank]
        controller.begin(steps[0] - 1)
        for step in steps:
            self.trace[rank].append(controller.layout.counts)
            controller.before_step(step)
            hooks = self.hook_seconds if self.profilers[rank].running else 0.0
            controller.after_step(step, self.step_seconds(step, controller.layout) + hooks)
            if step in self.told_at:
                controller.costs_changed()
            controller.at_boundary(step)
        if close:
            controller.close()

    def run(self, last, *, first=1, skipped=(), close=True):
        """Train; every rank must come through, in the same layouts, holding the layers that they say."""
        steps = [step for step in range(first, last + 1) if step not in skipped]
        assert self.world.run(partial(self.train, steps=steps, close=close)) == [None] * self.world.size
        assert all(trace == self.trace[0] for trace in self.trace)
        layout = self.controllers[0].layout
        for rank, store in enumerate(self.stores):
            assert tuple(store.layers) == layout.layers_of_stage(rank)
            assert self.controllers[rank].layout == layout
        return self

    def commits(self):
        return [report for report in self.sink.rounds if report.outcome is Outcome.COMMIT]

    def rounds_at(self):
        return [report.iteration for report in self.sink.rounds]
