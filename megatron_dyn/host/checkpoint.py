"""The layout of a checkpoint: written with it, continued at when it is loaded, and guarded where it decides what loads where.

The layout itself is stamped on Megatron's arguments (`host.layout`), which every checkpoint holds. Here it is read back,
before the model is built and again before anything is loaded. Uses Megatron's own reader; must not know how layers move.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing import load_content_metadata
from megatron.core.dist_checkpointing.core import CheckpointingException
from torch.utils.serialization import config as serialization

from megatron_dyn.config import ConfigError
from megatron_dyn.host.layout import layout_of_args, stamped_layout
from megatron_dyn.host.seams import Seam
from megatron_dyn.records import Layout, LayoutError

_PLACING_FLAGS = {
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
}
"""Arguments by which a user says where layers go, and their values when the user does not."""

_UNREADABLE = (OSError, EOFError, NotImplementedError, RuntimeError, pickle.UnpicklingError, CheckpointingException)


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What a checkpoint says about itself, as far as the layout matters."""

    source: str
    """The flag that names it and its folder: `--load checkpoints/`."""
    layout: Layout | None
    """The layout it was written at; None where its arguments do not tell."""
    stage_numbering: bool
    """Whether layers are keyed by their number within a stage (format torch) and not by their number in the model."""
    optimizer_format: str | None
    """How a distributed optimizer's state is cut, in Megatron's word; None where no distributed optimizer was saved."""
    iteration: int = 0
    """Iterations that were finished when it was written; 0 for a release."""
    args: Any = None
    """Megatron's arguments of the run that wrote it; None where it does not hold them."""

    @property
    def where(self) -> str:
        """The checkpoint and its layout, for messages."""
        if self.layout is None:
            return f"{self.source}: the checkpoint does not tell its layout"
        return f"{self.source}: the checkpoint was written at layout {_describe(self.layout)}"


def read(args: Any, load_arg: str = "load") -> Saved | None:
    """Describe the checkpoint that Megatron would load for `args.<load_arg>`; None where there is none to load.

    Reads no weights: the common part of a distributed checkpoint, or the first rank's file through a memory map. Needs no
    torch.distributed; once that is there, all ranks must call (Megatron compares the iteration over them). Raises ConfigError
    naming the flag where the checkpoint cannot be read.
    """
    # Not at the top: it imports Megatron's training, which the platform has to precede.
    from megatron.training import checkpointing

    folder = getattr(args, load_arg)
    if folder is None:
        return None
    source = f"--{load_arg.replace('_', '-')} {folder}"
    try:
        path = checkpointing.get_load_checkpoint_path_by_args(args, load_arg)
        by_rank = os.path.isdir(path) and checkpointing._get_checkpoint_format(path, args) == "torch"
        # Otherwise every rank would hold all weights and moments of the first one while it looks for the arguments.
        with serialization.patch({"load.mmap": by_rank}):
            state, _, release, kind = checkpointing._load_base_checkpoint(folder, args, rank0=True)
    except _UNREADABLE as error:
        raise ConfigError(f"{source}: the checkpoint cannot be read: {error}") from error
    if state is None:
        return None
    saved_args = state.get("args")
    return Saved(
        source=source,
        layout=_layout_of(saved_args),
        stage_numbering=kind is not checkpointing.CheckpointType.GLOBAL,
        optimizer_format=None if release else _optimizer_format(state, saved_args),
        iteration=0 if release else int(state.get("iteration") or 0),
        args=saved_args,
    )


def saved_state(args: Any, load_arg: str, name: str) -> tuple[int, dict[str, Any]]:
    """(finished iterations, the mapping that was kept as attribute `name`) of the checkpoint about to be loaded.

    (0, {}) where there is none, or where Megatron will take its weights only and begin anew. All ranks must call.
    """
    if args.finetune or _takes_pretrained(args, load_arg):
        return 0, {}
    saved = read(args, load_arg)
    if saved is None:
        return 0, {}
    return saved.iteration, dict(getattr(saved.args, name, None) or {})


def continue_at_saved_layout(args: Any, flags: Layout, *, wanted: bool | None) -> str | None:
    """Let the run start at the layout of the checkpoint it loads, if it fits; returns one line for the user, or None.

    `flags` is the layout that `args` give so far. `wanted` is `--dyn-layout-from-checkpoint`; None takes the checkpoint's
    layout unless `args` say where layers go. Every rank must call, after Megatron validated `args` and before it builds the
    model. Raises ConfigError where the checkpoint cannot be read.
    """
    saved = read(args)
    if saved is None or saved.layout is None:
        return None
    if saved.layout == flags:
        return None
    if not _fits(saved.layout, flags):
        return f"{saved.where}, which does not fit this run and is dropped: it starts at {_describe(flags)}"
    placed = any(getattr(args, name, off) != off for name, off in _PLACING_FLAGS.items())
    if placed if wanted is None else not wanted:
        return f"{saved.where}; this run starts at {_describe(flags)}, as its flags say"
    for name, off in _PLACING_FLAGS.items():
        setattr(args, name, off)
    args.pipeline_model_parallel_layout = saved.layout.text
    return f"{saved.where}; this run continues there, not at {_describe(flags)}"


def refusal(args: Any, saved: Saved, run: Layout, *, finetune: bool) -> str | None:
    """One line that says why `saved` must not be loaded into a run at layout `run`; None where it may.

    `finetune` tells that Megatron will load the weights only.
    """
    if saved.layout == run:
        return None
    there = "" if saved.layout is None else f", or run at its layout ({_as_flags(saved.layout)})"
    if saved.stage_numbering:
        return (
            f"{saved.where}, this run is at {_describe(run)}, and its format numbers layers by stage, so that they would "
            f"land in other layers: write with --ckpt-format torch_dist{there}"
        )
    # As Megatron's own load_checkpoint decides whether the optimizer's state is loaded.
    if finetune or args.no_load_optim or saved.optimizer_format is None or not args.use_distributed_optimizer:
        return None
    from megatron.core.optimizer import DistributedOptimizer

    if saved.optimizer_format in DistributedOptimizer.checkpoint_fully_reshardable_formats:
        return None
    return (
        f"{saved.where}, this run is at {_describe(run)}, and its optimizer state, of format {saved.optimizer_format}, "
        f"fits no other layout: write with --dist-ckpt-optim-fully-reshardable, load without it by --no-load-optim{there}"
    )


def rows(args: Any) -> tuple[Seam, ...]:
    """The ledger rows around loading, in force while layers may move."""
    return (
        guard(args),
        Seam(
            target="megatron.training.checkpointing:_load_base_checkpoint",
            why="a stage that lost all its layers has nothing in the checkpoint, and Megatron fails on what is not there",
            remove_when="load_checkpoint skips a stage without a model, as it does with several chunks",
            parameters=("load_dir", "args", "rank0"),
            wrap=_with_empty_model,
        ),
    )


def _with_empty_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_base_checkpoint(*positional: Any, **options: Any) -> Any:
        state, *rest = original(*positional, **options)
        if isinstance(state, dict) and not any(key.startswith("model") for key in state):
            # Loading nothing into a stage that holds nothing is right; into any other it fails, naming what is missing.
            state["model"] = {}
        return (state, *rest)

    return load_base_checkpoint


def guard(args: Any) -> Seam:
    """The row that refuses, before anything is loaded, a checkpoint whose content would land in other layers."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load_checkpoint(
            ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", *rest: Any, **options: Any
        ) -> Any:
            _check_load(args, load_arg)
            return original(ddp_model, optimizer, opt_param_scheduler, load_arg, *rest, **options)

        return load_checkpoint

    return Seam(
        target="megatron.training.training:load_checkpoint",
        why="Megatron compares the TP and PP sizes only: a checkpoint of another layout of the same size can load into "
        "other layers, without an error",
        remove_when="load_checkpoint compares the layouts",
        parameters=("ddp_model", "optimizer", "opt_param_scheduler", "load_arg"),
        wrap=wrap,
    )


def finish_saves() -> None:
    """Wait until every asynchronous save of this job is on disk. All ranks must call, before layers move.

    A save in flight refers to the tensors of the layers it was started with. Without `--async-save` it does nothing.
    """
    from megatron.training.async_utils import maybe_finalize_async_save

    maybe_finalize_async_save(blocking=True)


def _check_load(args: Any, load_arg: str) -> None:
    """End the job, on all ranks alike, where the checkpoint must not be loaded. All ranks must call."""
    run = layout_of_args(args)
    pretrained = _takes_pretrained(args, load_arg)
    try:
        saved = read(args, "pretrained_checkpoint" if pretrained else load_arg)
        told = None if saved is None else refusal(args, saved, run, finetune=pretrained or args.finetune)
    except ConfigError as error:
        told = str(error)
    views = _gather((run.text, told))
    refusals = [line for _, line in views if line is not None]
    layouts = {text: rank for rank, (text, _) in enumerate(views)}
    if len(layouts) > 1:
        seen = ", ".join(f"{text!r} on rank {rank}" for text, rank in layouts.items())
        refusals.append(f"--load: expected one layout on all ranks, got {seen}: they read different checkpoints")
    if refusals:
        # Everybody leaves here together, so nobody is left waiting for a peer.
        if not dist.is_initialized() or dist.get_rank() == 0:
            sys.stdout.flush()
            sys.stderr.write(f"megatron_dyn: error: {refusals[0]}\n")
        raise SystemExit(2)


def _takes_pretrained(args: Any, load_arg: str) -> bool:
    """Whether Megatron will start from `--pretrained-checkpoint`, with its weights only, for want of a checkpoint to resume."""
    if getattr(args, "pretrained_checkpoint", None) is None:
        return False
    from megatron.training.checkpointing import checkpoint_exists

    return not checkpoint_exists(getattr(args, load_arg))


def _gather(view: tuple[str, str | None]) -> list[tuple[str, str | None]]:
    if not dist.is_initialized():
        return [view]
    views: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(views, view)
    return views


def _layout_of(saved_args: Any) -> Layout | None:
    try:
        return stamped_layout(saved_args) or layout_of_args(saved_args)
    except (AttributeError, TypeError, ValueError):
        # Arguments of a release that had no such flags, or of a model that has no such layout.
        return None


def _optimizer_format(state: dict[str, Any], saved_args: Any) -> str | None:
    if getattr(saved_args, "no_save_optim", False) or not getattr(saved_args, "use_distributed_optimizer", False):
        return None
    if (metadata := load_content_metadata(preloaded_state_dict=state)) is not None:
        return str(metadata.get("distrib_optim_sharding_type"))
    # Checkpoints older than megatron-core 0.13, as Megatron's own load_checkpoint reads them.
    return "fully_sharded_model_space" if getattr(saved_args, "ckpt_fully_parallel_save", False) else "dp_zero_gather_scatter"


def _fits(saved: Layout, flags: Layout) -> bool:
    """Whether a run whose flags give one layout can start at another: the same model, stages, chunks and ends."""
    try:
        return flags.with_counts(saved.counts) == saved
    except LayoutError:
        return False


def _as_flags(layout: Layout) -> str:
    return f"--pipeline-model-parallel-size {layout.num_stages} --pipeline-model-parallel-layout '{layout.text}'"


def _describe(layout: Layout) -> str:
    chunks = f" x {layout.num_virtual} chunks" if layout.num_virtual > 1 else ""
    return f"{layout.text!r} ({layout.num_stages} stage{'s' * (layout.num_stages > 1)}{chunks})"
