"""The decoder layers of this rank's stage: find them, build one, take some out, put some in, wrap anew.

The block, the model and the DDP object keep their identity, since `train()` and Megatron's config hold references to them;
only their content changes. Layers are known by their global 0-based id, which is Megatron's `layer_number - 1`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel import (
    get_cuda_rng_tracker,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.utils import get_attr_wrapped_model

from megatron_dyn.host.layout import layer_offset
from megatron_dyn.ports import JobError


class StageError(JobError):
    """A model that the plugin cannot edit; the message names the rank's class or layer, expected and actual."""


class StageModel:
    """One per rank, bound to the single model chunk of the job."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        """`chunks` is the list `setup_model_and_optimizer` returned. Raises StageError for what cannot be edited."""
        if len(chunks) != 1 or not isinstance(chunks[0], DistributedDataParallel):
            raise StageError(f"expected one DistributedDataParallel chunk, got {[type(chunk).__name__ for chunk in chunks]}")
        self.ddp = chunks[0]
        self.model = self.ddp.module
        while isinstance(self.model, Float16Module):
            self.model = self.model.module
        self.block = get_attr_wrapped_model(self.ddp, "decoder")
        self.config = self.block.config
        spec = getattr(self.model, "transformer_layer_spec", None)
        if not isinstance(spec, ModuleSpec):
            raise StageError(f"expected one ModuleSpec for all layers, got {type(spec).__name__} (layers differ in structure)")
        self._spec = spec

    @property
    def layers(self) -> dict[int, torch.nn.Module]:
        """The local decoder layers by global id, in order."""
        return {layer.layer_number - 1: layer for layer in self.block.layers}

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first stage."""
        return bool(self.model.pre_process)

    @property
    def has_head(self) -> bool:
        """Whether this is the last stage."""
        return bool(self.model.post_process)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        for parameter in self.ddp.parameters():
            return parameter.device
        # A stage without any parameter: it may get some.
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def build(self, layer: int) -> torch.nn.Module:
        """A new layer with id `layer`, beside the model, on the right device and in the right precision.

        Its values are undefined. No random number of the job is consumed, so that runs with and without moves agree.
        """
        number, options = layer + 1, {}
        if self._takes_global_numbers():
            options["add_layer_offset"] = False
        else:
            number -= layer_offset(self.config)
        with _untouched_rng(), _uninitialised(self.config):
            module = build_module(
                self._spec,
                config=self.config,
                layer_number=number,
                pg_collection=self.block.pg_collection,
                vp_stage=self.block.vp_stage,
                **options,
            )
        for parameter in module.parameters():
            set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        if self.config.bf16 or self.config.fp16:
            module = module.to(torch.bfloat16 if self.config.bf16 else torch.float16)
        if module.layer_number != layer + 1:
            raise StageError(f"built layer {module.layer_number - 1}, expected {layer}")
        return module.to(self.device).train(self.block.training)

    def replace(self, *, removed: Sequence[int], added: Mapping[int, torch.nn.Module]) -> None:
        """Change which layers the block runs, in id order. Raises StageError if a layer is missing or there twice."""
        layers = self.layers
        for layer in removed:
            if layers.pop(layer, None) is None:
                raise StageError(f"layer {layer} is not on this stage, which holds {sorted(self.layers)}")
        if twice := sorted(layers.keys() & added.keys()):
            raise StageError(f"layers {twice} are already on this stage")
        layers |= added
        self.block.layers = torch.nn.ModuleList(layers[layer] for layer in sorted(layers))
        self.block.num_layers_per_pipeline_rank = len(layers)

    def release_gradients(self) -> None:
        """Drop the gradient buffer and the hooks on parameters that stay, before new ones are made.

        Otherwise the peak would hold two buffers, and each gradient would be accumulated by old and new hooks.
        """
        self.ddp.grad_accs.clear()
        self.ddp.buffers, self.ddp.bucket_groups, self.ddp.param_to_bucket_group = [], [], {}
        for parameter in self.ddp.module.parameters():
            forget_gradient(parameter)

    def rewrap(self) -> None:
        """Initialise the same DDP object again around the changed module: new gradient buffer, new hooks."""
        ddp_config, config, module = self.ddp.ddp_config, self.ddp.config, self.ddp.module
        kept = {name: getattr(self.ddp, name) for name in ("force_all_reduce", "overlap_param_gather_with_optimizer_step")}
        training = self.ddp.training
        type(self.ddp).__init__(
            self.ddp,
            config=config,
            ddp_config=ddp_config,
            module=module,
            disable_bucketing=False,
            pg_collection=getattr(self.model, "pg_collection", None),
        )
        for name, value in kept.items():
            setattr(self.ddp, name, value)
        self.ddp.train(training)

    def _takes_global_numbers(self) -> bool:
        module: Any = self._spec.module
        return "add_layer_offset" in inspect.signature(module.__init__).parameters


def forget_gradient(parameter: torch.Tensor) -> None:
    """Let go of every view into a gradient buffer that is about to be freed."""
    parameter.grad = None
    if hasattr(parameter, "main_grad"):
        del parameter.main_grad
    if getattr(parameter, "main_param", None) is not None:
        # Converting an fp32 gradient to fp32 does not copy, so this is a view as well.
        parameter.main_param.grad = None


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
