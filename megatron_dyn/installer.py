"""The composition root: puts the plugin into a Megatron job that has parsed its arguments, and takes it out again.

Everything is made here and handed down; no module below asks for a global. Off means absent: with nothing to do, no seam
is applied.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rich.console import Console

from megatron_dyn.args import config_from_args
from megatron_dyn.config import ConfigError, DynConfig
from megatron_dyn.controller import Controller, Crew
from megatron_dyn.host import checkpoint, grad_norm
from megatron_dyn.host.collective import GlooCollective
from megatron_dyn.host.compat import HostError, check_host
from megatron_dyn.host.driver import JobDriver
from megatron_dyn.host.editors import editor_of
from megatron_dyn.host.layer_rng import LayerStreams
from megatron_dyn.host.layout import check_built, layout_of_args, stamp
from megatron_dyn.host.ledger import ledger
from megatron_dyn.host.memory import PeakMemory
from megatron_dyn.host.profiler import MegatronProfiler
from megatron_dyn.host.seams import Seam, Undo, apply
from megatron_dyn.host.stage import StageModel, share_specs
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.host.support import (
    check_exact_grad_norm,
    check_measurable,
    check_rng_per_layer,
    check_support,
    randomness_notice,
)
from megatron_dyn.host.transport import make_transport
from megatron_dyn.migrate import Seat
from megatron_dyn.ports import Sink
from megatron_dyn.records import Layout, LayoutError
from megatron_dyn.report import JsonlSink, LossLog, ReportError, TableSink, check_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What was put in. `undo()` takes it out; afterwards the host is as before."""

    config: DynConfig
    seams: tuple[Seam, ...]
    """The ledger rows in force; empty when the plugin is off."""
    undo: Undo
    request: Callable[[str], None] | None = None
    """`request(layout)`, in Megatron's layout syntax, brings a layout in force at the next step boundary, never within a step.

    To be called on all ranks with the same layout, while training runs; the last request before the boundary counts. None
    when layers cannot move in this run. Raises LayoutError, or ValueError for a layout that this run cannot go to.
    """


def install(args: Any, config: DynConfig | None = None) -> Installation:
    """Put the plugin into this rank's job. All ranks must call, after Megatron validated `args`, before `pretrain`.

    `config` None reads the `--dyn-*` values from `args`. Raises ConfigError, naming the flag, for what cannot be honoured,
    and HostError, naming all that is missing, for a Megatron-core that is not supported.
    """
    config = config_from_args(args) if config is None else config
    group_size = getattr(args, "microbatch_group_size_per_vp_stage", None)
    config = replace(config, decide=replace(config.decide, group_size=group_size))
    if config.report_dir is not None:
        check_directory(config.report_dir)
    seams: list[Seam] = []
    request: Callable[[str], None] | None = None
    if config.moves_possible:
        _check_moves(args, config)
        _settle_layout(args, config)
        if config.rebalances:
            check_measurable(_layout_of_flags(args))
        seams += checkpoint.rows(args)
    if config.moves_possible or config.record_losses:
        driver = _driver(args, config, _layout_of_flags(args))
        seams += driver.rows()
        request = _requester(driver, args.pipeline_model_parallel_size) if config.moves_possible else None
    if config.uses_exact_grad_norm:
        check_exact_grad_norm(args)
        seams.append(grad_norm.seam())
    if config.rng_per_layer:
        check_rng_per_layer(args)
        seams += LayerStreams(args).rows()
    # With the rows of a sampled step: a job must not find at its tenth step that one of their targets is gone.
    check_host((*seams, *ledger()["during a sampled step"]) if config.moves_possible else seams)
    return Installation(config=config, seams=tuple(seams), undo=apply(seams), request=request)


def install_or_exit(args: Any) -> Undo:
    """`install` for command lines: what cannot be honoured ends the process with one line and exit code 2."""
    try:
        return install(args).undo
    except (ConfigError, ReportError, HostError) as error:
        if _is_first_rank():
            sys.stderr.write(f"megatron_dyn: error: {error}\n")
        raise SystemExit(2) from error


def _check_moves(args: Any, config: DynConfig) -> None:
    """Refuse what layers cannot move under; warn of what moves will not be exact under."""
    check_support(args)
    notice = None if config.rng_per_layer else randomness_notice(args)
    if notice is not None and _is_first_rank():
        logger.warning("megatron_dyn: %s", notice)


def _requester(driver: JobDriver, num_stages: int) -> Callable[[str], None]:
    """See Installation.request."""
    return lambda layout: driver.request(Layout.parse(layout, num_stages))


def _settle_layout(args: Any, config: DynConfig) -> None:
    """Choose between the layout of the flags and that of the checkpoint, before anything is built; tell if it matters."""
    before = _layout_of_flags(args)
    if (notice := checkpoint.continue_at_saved_layout(args, before, wanted=config.layout_from_checkpoint)) and _is_first_rank():
        logger.warning("megatron_dyn: %s", notice)
    stamp(args, _layout_of_flags(args))


def _layout_of_flags(args: Any) -> Layout:
    try:
        return layout_of_args(args)
    except LayoutError as error:
        raise ConfigError(f"the layout Megatron will build cannot be read: {error}") from error


def _driver(args: Any, config: DynConfig, layout: Layout) -> JobDriver:
    make_rounds: Callable[[list[Any], Any], Controller] | None = None
    open_losses: Callable[[], LossLog] | None = None
    if config.moves_possible:
        forced = config.forced_layouts(built=layout)

        def make_rounds(model: list[Any], optimizer: Any) -> Controller:
            return _controller(args, config, layout, forced, model, optimizer)

    if config.record_losses and config.report_dir is not None:
        directory = config.report_dir

        def open_losses() -> LossLog:
            return LossLog(directory)

    return JobDriver(args, layout_text=layout.text, make_rounds=make_rounds, open_losses=open_losses)


def _controller(
    args: Any, config: DynConfig, layout: Layout, forced: dict[int, Layout], model: list[Any], optimizer: Any
) -> Controller:
    """Everything a round works with. All ranks together: it makes the one process group the plugin owns."""
    stage = StageModel(model)
    check_built(layout, tuple(stage.layers))
    editor = editor_of(optimizer)
    store = MegatronLayerStore(stage, editor, args)
    collective = GlooCollective(timeout_seconds=config.timeout_seconds)
    share_specs(stage, collective)
    on_gpu = stage.device.type == "cuda"
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    crew = Crew(
        collective=collective,
        transport=make_transport(config, collective, on_gpu=on_gpu),
        store=store,
        seat=Seat(
            global_rank=dist.get_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pipeline_ranks=tuple(dist.get_process_group_ranks(pipeline_group)),
            device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        ),
        source=store,
        profiler=MegatronProfiler(stage, editor, optimizer),
        memory=PeakMemory(stage.device),
        sinks=_sinks(config) if dist.get_rank() == 0 else (),
    )
    return Controller(
        config,
        crew,
        layout=layout,
        forced=forced,
        last_step=args.train_iters,
        tokens_per_step=args.global_batch_size * args.seq_length,
    )


def _sinks(config: DynConfig) -> tuple[Sink, ...]:
    table = TableSink(Console(file=sys.stdout))
    return (table,) if config.report_dir is None else (JsonlSink(config.report_dir), table)


def _is_first_rank() -> bool:
    return int(os.environ.get("RANK", "0")) == 0
