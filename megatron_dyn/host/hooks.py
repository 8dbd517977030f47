"""Hooks that tell the recorder to whom time belongs during one sampled step. Put in before the step, taken out after it.

Forward: module hooks on each layer. Backward: hooks on the tensors between layers (they run when the gradient of that tensor
is known, copy nothing, and leave the graph alone). The gradient of a layer's output starts that layer; the gradient of the
first layer's input ends it. A layer that runs forward inside a backward is recomputation and counts as backward.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch

from megatron_dyn.host.activations import ActivationMeter
from megatron_dyn.host.chunk import ModelChunk
from megatron_dyn.host.seams import Seam, apply
from megatron_dyn.host.stage import StageModel
from megatron_dyn.measure import Kind, Recorder, Slot

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"


class StepProfiler:
    """Installs and removes the hooks around one step. One per rank; the recorder is injected."""

    def __init__(self, stage: StageModel, recorder: Recorder, optimizer: Any) -> None:
        """`optimizer` is the job's MegatronOptimizer: its `step` is timed on sampled steps."""
        self._stage = stage
        self._recorder = recorder
        self._optimizer = optimizer
        self._undo: list[Callable[[], None]] = []
        self._in_backward = False
        self._meter: ActivationMeter | None = None

    def start(self, meter: ActivationMeter | None = None) -> None:
        """Hook in for the step that begins now; `meter` also weighs the activations of its first micro-batch."""
        self._meter = meter
        self._undo.append(apply(self.seams()))
        for chunk in self._stage.chunks:
            layers = chunk.layers
            for layer, module in layers.items():
                entering = self._entering(layer, chunk, first=layer == min(layers))
                leaving = self._leaving(layer, chunk, last=layer == max(layers))
                self._undo.append(module.register_forward_pre_hook(entering, with_kwargs=True).remove)
                self._undo.append(module.register_forward_hook(leaving).remove)
        self._time_optimizer()
        self._recorder.begin()

    def stop(self) -> None:
        """Take every hook out again. Idempotent."""
        while self._undo:
            self._undo.pop()()
        self._meter = None

    def _switch(self, slot: Slot) -> Slot:
        previous = self._recorder.switch(slot)
        if self._meter is not None:
            self._meter.note(previous)
        return previous

    def seams(self) -> tuple[Seam, ...]:
        """The ledger rows in force during a sampled step."""
        return (
            Seam(
                target=f"{_SCHEDULES}:forward_step",
                why="the start and end of a micro-batch's forward on this stage",
                remove_when="Megatron times its stages itself",
                parameters=("forward_step_func", "model", "input_tensor", "config"),
                wrap=self._around_forward,
            ),
            Seam(
                target=f"{_SCHEDULES}:backward_step",
                why="the start and end of a micro-batch's backward on this stage",
                remove_when="Megatron times its stages itself",
                parameters=("input_tensor", "output_tensor", "output_tensor_grad", "config"),
                wrap=self._around_backward,
            ),
            Seam(
                target="megatron.core.pipeline_parallel.p2p_communication:P2PCommunicator._communicate",
                why="every point-to-point wait of the schedule passes here",
                remove_when="Megatron reports waiting apart from computing",
                parameters=("self", "recv_prev", "recv_next"),
                wrap=self._around(Slot(Kind.WAIT)),
            ),
        )

    def _side(self, kind: Kind, layer: int = -1) -> Slot:
        return Slot(kind, layer, self._in_backward)

    def _before_layers(self, chunk: ModelChunk) -> Slot:
        """To whom time belongs on the input side of the layers: embedding, or in the last chunk the batch of the loss."""
        if chunk.has_embedding:
            return self._side(Kind.EMBEDDING)
        return self._side(Kind.HEAD if chunk.has_head else Kind.OTHER)

    def _after_layers(self, chunk: ModelChunk) -> Slot:
        """The same on the output side, which is the input side as well where a chunk holds no layer."""
        if not chunk.layers and not chunk.has_head:
            return self._before_layers(chunk)
        return self._side(Kind.HEAD if chunk.has_head else Kind.OTHER)

    def _chunk_of_forward(self, model: Any) -> ModelChunk:
        return next((chunk for chunk in self._stage.chunks if chunk.ddp is model), self._stage.chunks[0])

    def _chunk_of_backward(self, output_tensor_grad: Any) -> ModelChunk | None:
        """The schedule does not say which chunk a backward is of; only that of the loss comes without a gradient."""
        if len(self._stage.chunks) == 1:
            return self._stage.chunks[0]
        grads = output_tensor_grad if isinstance(output_tensor_grad, list) else [output_tensor_grad]
        if any(grad is not None for grad in grads):
            return None
        return next((chunk for chunk in self._stage.chunks if chunk.has_head), None)

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            self._in_backward = False
            chunk = self._chunk_of_forward(signature.bind(*args, **kwargs).arguments["model"])
            if chunk is self._stage.chunks[0]:
                # The other chunks see the same micro-batches again.
                self._recorder.count_microbatch()
            before = self._switch(self._before_layers(chunk))
            try:
                if self._meter is None or self._meter.done:
                    return original(*args, **kwargs)
                with self._meter.weighing(lambda: self._recorder.current):
                    return original(*args, **kwargs)
            finally:
                self._switch(before)

        return forward_step

    def _around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        @wraps(original)
        def backward_step(*args: Any, **kwargs: Any) -> Any:
            self._in_backward = True
            chunk = self._chunk_of_backward(signature.bind(*args, **kwargs).arguments["output_tensor_grad"])
            before = self._switch(self._side(Kind.OTHER) if chunk is None else self._after_layers(chunk))
            try:
                return original(*args, **kwargs)
            finally:
                self._in_backward = False
                self._switch(before)

        return backward_step

    def _around(self, slot: Slot) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                before = self._switch(slot)
                try:
                    return original(*args, **kwargs)
                finally:
                    self._switch(before)

            return timed

        return wrap

    def _time_optimizer(self) -> None:
        """An attribute of the instance hides the method for one step; what was there before comes back."""
        before = vars(self._optimizer).get("step")
        self._optimizer.step = self._around(Slot(Kind.OPTIMIZER))(self._optimizer.step)

        def give_back() -> None:
            if before is None:
                del self._optimizer.step
            else:
                self._optimizer.step = before

        self._undo.append(give_back)

    def _entering(self, layer: int, chunk: ModelChunk, *, first: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._switch(self._side(Kind.LAYER, layer))
            hidden = kwargs.get("hidden_states", args[0] if args else None)
            if first and isinstance(hidden, torch.Tensor) and hidden.requires_grad and torch.is_grad_enabled():
                hidden.register_hook(lambda grad: self._mark(lambda: self._before_layers(chunk)))

        return hook

    def _leaving(self, layer: int, chunk: ModelChunk, *, last: bool) -> Callable[..., None]:
        def hook(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
                hidden.register_hook(lambda grad: self._mark(lambda: self._side(Kind.LAYER, layer)))
            # Inside a backward the layer keeps its time: recomputation is followed by its own backward.
            if not self._in_backward:
                self._switch(self._after_layers(chunk) if last else self._side(Kind.OTHER))

        return hook

    def _mark(self, slot: Callable[[], Slot]) -> None:
        """A gradient hook: switches, and returns None so that the gradient stays what it is."""
        self._switch(slot())
