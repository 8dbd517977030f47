"""The decoder layers of this rank's stage, over all its model chunks: find them, build one, deal them out anew, wrap anew.

Blocks, models and DDP objects keep their identity, since `train()` and Megatron's config hold references to them; only their
content changes. Layers are known by their global 0-based id, which is Megatron's `layer_number - 1`.
"""

import inspect
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    get_cuda_rng_tracker,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.spec_utils import build_module

from megatron_dyn.host.chunk import ModelChunk, StageError
from megatron_dyn.host.layout import layer_offset
from megatron_dyn.ports import Collective
from megatron_dyn.records import Layout


class StageModel:
    """One per rank, bound to the model chunks of the job."""

    def __init__(
        self, chunks: Sequence[torch.nn.Module], *, dress: Callable[[int, torch.nn.Module], None] | None = None
    ) -> None:
        """`chunks` is the list `setup_model_and_optimizer` returned. Raises StageError for what cannot be edited.

        `dress(layer, module)` is applied to every layer that is built here, as it was to those Megatron built.
        """
        self._dress = dress
        self.chunks = [ModelChunk(chunk, index) for index, chunk in enumerate(chunks)]
        self.pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        self._specs = {layer: spec for chunk in self.chunks for layer, spec in chunk.specs.items()}

    @property
    def specs(self) -> Mapping[int, Any]:
        """The module spec of each known layer, by global id: the local ones, until `learn_specs`."""
        return self._specs

    def learn_specs(self, specs: Mapping[int, Any]) -> None:
        """Take the specs of layers on other ranks, so that these can be built here."""
        self._specs = {**specs, **self._specs}

    @property
    def layers(self) -> dict[int, torch.nn.Module]:
        """The local decoder layers by global id, in order."""
        return dict(sorted((layer, module) for chunk in self.chunks for layer, module in chunk.layers.items()))

    @property
    def has_embedding(self) -> bool:
        """Whether the first model chunk of the pipeline is here."""
        return any(chunk.has_embedding for chunk in self.chunks)

    @property
    def has_head(self) -> bool:
        """Whether the last model chunk of the pipeline is here."""
        return any(chunk.has_head for chunk in self.chunks)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        for parameter in self.parameters():
            return parameter.device
        # A stage without any parameter: it may get some.
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """All parameters, chunk by chunk, in the order in which Megatron's optimizer saw them."""
        for chunk in self.chunks:
            yield from chunk.ddp.parameters()

    def build(self, layer: int, chunk_index: int) -> torch.nn.Module:
        """A new layer with id `layer` for a chunk, beside the model, on the right device and in the right precision.

        Its values are undefined. No random number of the job is consumed, so that runs with and without moves agree.
        """
        block, config = self.chunks[chunk_index].block, self.chunks[chunk_index].config
        number, options = layer + 1, {}
        spec = self._specs[layer]
        if "add_layer_offset" in inspect.signature(spec.module.__init__).parameters:
            options["add_layer_offset"] = False
        else:
            number -= layer_offset(config, block.vp_stage)
        with _untouched_rng(), _uninitialised(config):
            module = build_module(
                spec,
                config=config,
                layer_number=number,
                pg_collection=block.pg_collection,
                vp_stage=block.vp_stage,
                **options,
            )
            _mark_slices(module)
            if self._dress is not None:
                self._dress(layer, module)
        for parameter in module.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if config.bf16 or config.fp16:
            module = module.to(torch.bfloat16 if config.bf16 else torch.float16)
        if module.layer_number != layer + 1:
            raise StageError(f"built layer {module.layer_number - 1}, expected {layer}")
        return module.to(self.device).train(block.training)

    def deal(self, layout: Layout, modules: Mapping[int, torch.nn.Module]) -> None:
        """Give every chunk the layers that `layout` says, out of `modules`. Raises StageError when one is missing."""
        for chunk, layers in zip(self.chunks, layout.layers_by_chunk(self.pp_rank), strict=True):
            if missing := sorted(set(layers) - modules.keys()):
                raise StageError(
                    f"stage {self.pp_rank}: layers {missing} of layout {layout.text!r} are not here: {sorted(modules)}"
                )
            chunk.set_layers([modules[layer] for layer in layers])

    def touched(self, before: Layout, after: Layout) -> list[ModelChunk]:
        """The chunks whose layers differ between two layouts."""
        here_before, here_after = before.layers_by_chunk(self.pp_rank), after.layers_by_chunk(self.pp_rank)
        pairs = zip(self.chunks, here_before, here_after, strict=True)
        return [chunk for chunk, here, there in pairs if here != there]


def share_specs(stage: StageModel, collective: Collective) -> None:
    """Let every rank know how each layer of the model is built, wherever it is. All ranks must call.

    Megatron gives a stage the specs of its own layers only, and they may differ from layer to layer (dense and MoE).
    Raises StageError on all ranks when a spec cannot be sent.
    """
    packed: bytes | str
    try:
        packed = pickle.dumps(dict(stage.specs))
    except Exception as error:  # noqa: BLE001 - what is pickled may raise anything, and the other ranks must hear of it
        packed = f"rank {collective.rank}: the specs of layers {sorted(stage.specs)} cannot be sent: {error}"
    gathered: list[bytes | str] = collective.gather(packed, "specs of the layers")
    if problems := [told for told in gathered if isinstance(told, str)]:
        raise StageError("; ".join(problems))
    specs: dict[int, Any] = {}
    for other in {told for told in gathered if isinstance(told, bytes)}:
        # Written by a peer rank of this very job a moment ago, so its pickle is as trusted as the job itself.
        specs |= pickle.loads(other)
    stage.learn_specs(specs)


def _mark_slices(module: torch.nn.Module) -> None:
    """Say of every weight of a parallel linear layer that it is a slice, as 0.17 does only where it also initialises it.

    Otherwise the norm of gradients would count that of one tensor-parallel rank alone.
    """
    for part in module.modules():
        if not isinstance(part, ColumnParallelLinear | RowParallelLinear):
            continue
        if part.weight is not None and not hasattr(part.weight, "tensor_model_parallel"):
            dimension = 0 if isinstance(part, ColumnParallelLinear) else 1
            # The bias of a cut output is marked anyway.
            stride = getattr(part.bias, "partition_stride", 1)
            set_tensor_model_parallel_attributes(part.weight, is_parallel=True, dim=dimension, stride=stride)


@contextmanager
def _untouched_rng() -> Iterator[None]:
    """Give back the default generators and Megatron's tracked states as they were."""
    tracker = get_cuda_rng_tracker()
    states = {name: state.clone() if isinstance(state, torch.Tensor) else state for name, state in tracker.get_states().items()}
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else []):
        try:
            yield
        finally:
            tracker.set_states(states)


@contextmanager
def _uninitialised(config: Any) -> Iterator[None]:
    """Skip weight initialisation: the values are about to be overwritten."""
    before = config.perform_initialization
    config.perform_initialization = False
    try:
        yield
    finally:
        config.perform_initialization = before
