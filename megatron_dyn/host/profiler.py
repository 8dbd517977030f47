"""The host's side of measuring: implements controller.Profiler with hooks, a clock and tensor sizes."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_dyn.host.activations import ActivationMeter, activation_meter
from megatron_dyn.host.clock import CudaEventClock, PerfCounterClock
from megatron_dyn.host.editors import Editor
from megatron_dyn.host.footprint import footprint
from megatron_dyn.host.hooks import StepProfiler
from megatron_dyn.host.seams import apply
from megatron_dyn.host.stage import StageModel
from megatron_dyn.measure import Footprint, Position, Recorder, StepReading


class MegatronProfiler:
    """One per rank."""

    def __init__(
        self,
        stage: StageModel,
        editor: Editor,
        optimizer: Any,
        *,
        notes: Callable[[int], Mapping[str, Any]] = lambda layer: {},
    ) -> None:
        """`optimizer` is the job's MegatronOptimizer, `editor` the one bound to it.

        `notes(layer)` is what the dynamic families have to say on a local layer.
        """
        self._notes = notes
        clock = CudaEventClock() if stage.device.type == "cuda" else PerfCounterClock()
        self._stage, self._editor = stage, editor
        self._recorder = Recorder(clock)
        self._hooks = StepProfiler(stage, self._recorder, optimizer)
        # A host that changed is found now, not at the first sampled step.
        apply(self._hooks.seams())()
        self._meter: ActivationMeter | None = None

    def start(self) -> None:
        """See controller.Profiler."""
        if self._meter is None:
            self._meter = activation_meter(self._stage.parameters(), self._stage.device)
        self._hooks.start(self._meter)

    def stop(self, iteration: int) -> StepReading:
        """See controller.Profiler."""
        self._hooks.stop()
        return self._recorder.end(iteration)

    def cancel(self) -> None:
        """See controller.Profiler."""
        self._hooks.stop()

    def position(self) -> Position:
        """See controller.Profiler."""
        return Position(
            global_rank=dist.get_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            layers=tuple(self._stage.layers),
            has_embedding=self._stage.has_embedding,
            has_head=self._stage.has_head,
        )

    def footprint(self) -> Footprint:
        """See controller.Profiler."""
        weighed = footprint(self._stage, self._editor, self._meter.bytes_by_slot if self._meter else {})
        told = {layer: self._notes(layer) for layer in self._stage.layers}
        return replace(weighed, notes={layer: notes for layer, notes in told.items() if notes})

    def layout_changed(self) -> None:
        """See controller.Profiler."""
        self._meter = None
