"""One model chunk (virtual stage) of this rank: its DDP object, its block, and how both take other layers in.

Knows Megatron's DDP and block; not which layers belong where (`stage`), nor the optimizer.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_attr_wrapped_model

from megatron_dyn.host.buffer_layout import buffer_layout, takes_layout
from megatron_dyn.ports import JobError


class StageError(JobError):
    """A model that the plugin cannot edit; the message names the rank's class or layer, expected and actual."""


class ModelChunk:
    """One element of the list `setup_model_and_optimizer` returned."""

    def __init__(self, ddp: torch.nn.Module, index: int) -> None:
        """`index` is the virtual stage on this rank. Raises StageError for what cannot be edited."""
        if not isinstance(ddp, DistributedDataParallel):
            raise StageError(f"chunk {index}: expected a DistributedDataParallel, got a {type(ddp).__name__}")
        self.ddp, self.index = ddp, index
        self.model = ddp.module
        while isinstance(self.model, Float16Module):
            self.model = self.model.module
        self.block: Any = get_attr_wrapped_model(ddp, "decoder")
        self.config = self.block.config
        specs = self.block.submodules.layer_specs or []
        if len(specs) != len(self.block.layers):
            raise StageError(f"chunk {index}: {len(self.block.layers)} layers were built from {len(specs)} specs")
        self.specs: Mapping[int, Any] = dict(zip(self.layers, specs, strict=True))
        """The module spec of each layer that Megatron built here, by global id."""

    @property
    def layers(self) -> dict[int, torch.nn.Module]:
        """The decoder layers by global id, in order."""
        return {layer.layer_number - 1: layer for layer in self.block.layers}

    @property
    def has_embedding(self) -> bool:
        """Whether this is the first chunk of the pipeline."""
        return bool(self.model.pre_process)

    @property
    def has_head(self) -> bool:
        """Whether this is the last chunk of the pipeline."""
        return bool(self.model.post_process)

    def set_layers(self, modules: Sequence[torch.nn.Module]) -> None:
        """Make `modules` the layers of the block, in this order."""
        if [*self.block.layers] == list(modules):
            # Hooks of overlapped gathers sit on the list as well: a chunk that stays as it is keeps its list.
            return
        self.block.layers = torch.nn.ModuleList(modules)
        self.block.num_layers_per_pipeline_rank = len(modules)

    def layout_with(self, modules: Sequence[torch.nn.Module]) -> Any:
        """The layout that Megatron's distributed optimizer would give the chunk's buffers if its layers were `modules`."""
        before = self.block.layers
        self.block.layers = torch.nn.ModuleList(modules)
        try:
            trainable = [parameter for parameter in self.ddp.module.parameters() if parameter.requires_grad]
        finally:
            self.block.layers = before
        return buffer_layout(self.ddp, trainable, bucketed=self.index == 0)

    def sync_parameters(self) -> None:
        """Let a gather of parameters that is under way, or due with the next forward, happen now.

        With overlapped gathers a rank's parameters are up to date only where it owns them. All ranks of the chunk's
        data-parallel group must call.
        """
        if self.ddp.ddp_config.overlap_param_gather:
            with torch.no_grad():
                self.ddp.start_param_sync(force_sync=True)

    def release_gradients(self) -> None:
        """Drop the gradient buffer and the hooks on parameters that stay, before new ones are made.

        Otherwise the peak would hold two buffers, and each gradient would be accumulated by old and new hooks.
        """
        if self.hooks_on:
            self.ddp.disable_forward_pre_hook(param_sync=False)
        self.ddp.grad_accs.clear()
        self.ddp.params_with_grad = []
        self.ddp.buffers, self.ddp.expert_parallel_buffers = [], []
        self.ddp.bucket_groups, self.ddp.expert_parallel_bucket_groups = [], []
        self.ddp.param_to_bucket_group = {}
        self.ddp.full_param_layout = None
        for parameter in self.ddp.module.parameters():
            forget_gradient(parameter)
            forget_hooks(parameter)

    @property
    def hooks_on(self) -> bool:
        """Whether forward hooks wait for overlapped gathers of parameters: Megatron takes them off now and then."""
        return bool(getattr(self.ddp, "remove_forward_pre_hook_handles", None))

    def rewrap(self, *, hooks_on: bool) -> None:
        """Initialise the same DDP object again around the changed module: new buffers, new hooks.

        `hooks_on` is what `hooks_on` was before `release_gradients`: the training loop remembers what it switched off.
        """
        ddp = self.ddp
        ddp_config, config, module = ddp.ddp_config, ddp.config, ddp.module
        kept = {name: getattr(ddp, name) for name in ("force_all_reduce", "overlap_param_gather_with_optimizer_step")}
        training = ddp.training
        options = {}
        if ddp_config.use_distributed_optimizer and takes_layout():
            options["full_param_layout"] = self.layout_with([*self.block.layers])
        with _quiet("megatron.core.distributed"):
            type(ddp).__init__(
                ddp,
                config=config,
                ddp_config=ddp_config,
                module=module,
                disable_bucketing=self.index > 0,
                pg_collection=getattr(self.model, "pg_collection", None),
                **options,
            )
        for name, value in kept.items():
            setattr(ddp, name, value)
        if ddp.use_forward_hook and not hooks_on:
            ddp.disable_forward_pre_hook(param_sync=False)
        ddp.train(training)


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    """Keep a logger of Megatron's from listing all parameters of the stage again at every move."""
    loggers = [logging.getLogger(each) for each in logging.root.manager.loggerDict if each.startswith(name)]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(max(each.getEffectiveLevel(), logging.WARNING))
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)


def forget_hooks(parameter: torch.Tensor) -> None:
    """Let autograd accumulate the next gradient of a parameter at a new node, without the hooks of the old one.

    DDP hooks onto that node, and has no handle to take the hook off. The node goes with its last user, but graphs of experts
    keep it: then old and new hooks would both see each gradient. Data of another type makes torch drop its own reference
    (torch/csrc/autograd/variable.cpp, set_data).
    """
    if parameter.requires_grad:
        data = parameter.data
        parameter.data = data.new_empty(0, dtype=torch.float64 if data.dtype != torch.float64 else torch.float32)
        parameter.data = data


def forget_gradient(parameter: torch.Tensor) -> None:
    """Let go of every view into a gradient buffer that is about to be freed."""
    parameter.grad = None
    for name in ("main_grad", "main_grad_copy_in_grad_buffer"):
        if hasattr(parameter, name):
            delattr(parameter, name)
    if getattr(parameter, "main_param", None) is not None:
        # Converting an fp32 gradient to fp32 does not copy, so this is a view as well.
        parameter.main_param.grad = None
