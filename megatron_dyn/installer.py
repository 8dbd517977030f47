"""The composition root: puts the plugin into a Megatron job that has parsed its arguments, and takes it out again.

Everything is made here and handed down; no module below asks for a global. Off means absent: with nothing to do, no seam
is applied.
"""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rich.console import Console

from megatron_dyn.args import config_from_args
from megatron_dyn.config import ConfigError, DynConfig
from megatron_dyn.controller import Controller, Crew
from megatron_dyn.host import grad_norm
from megatron_dyn.host.collective import GlooCollective
from megatron_dyn.host.driver import JobDriver
from megatron_dyn.host.layout import check_built, layout_of_args
from megatron_dyn.host.optimizer import OptimizerEditor
from megatron_dyn.host.profiler import MegatronProfiler
from megatron_dyn.host.seams import Seam, Undo, apply
from megatron_dyn.host.stage import StageModel
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.host.support import check_exact_grad_norm, check_support, randomness_notice
from megatron_dyn.migrate import ProcessGroupTransport, Seat
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


def install(args: Any, config: DynConfig | None = None) -> Installation:
    """Put the plugin into this rank's job. All ranks must call, after Megatron validated `args`, before `pretrain`.

    `config` None reads the `--dyn-*` values from `args`. Raises ConfigError, naming the flag, for what cannot be honoured.
    """
    config = config_from_args(args) if config is None else config
    if config.report_dir is not None:
        check_directory(config.report_dir)
    seams: list[Seam] = []
    if config.moves_possible:
        check_support(args)
        if (notice := randomness_notice(args)) and _is_first_rank():
            logger.warning("megatron_dyn: %s", notice)
    if config.moves_possible or config.record_losses:
        seams += _driver(args, config).rows()
    if config.uses_exact_grad_norm:
        check_exact_grad_norm(args)
        seams.append(grad_norm.seam())
    return Installation(config=config, seams=tuple(seams), undo=apply(seams))


def install_or_exit(args: Any) -> Undo:
    """`install` for command lines: what cannot be honoured ends the process with one line and exit code 2."""
    try:
        return install(args).undo
    except (ConfigError, ReportError) as error:
        if _is_first_rank():
            sys.stderr.write(f"megatron_dyn: error: {error}\n")
        raise SystemExit(2) from error


def _driver(args: Any, config: DynConfig) -> JobDriver:
    try:
        layout = layout_of_args(args)
    except LayoutError as error:
        raise ConfigError(f"the layout Megatron will build cannot be read: {error}") from error
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
    editor = OptimizerEditor(optimizer)
    store = MegatronLayerStore(stage, editor, args)
    collective = GlooCollective(timeout_seconds=config.timeout_seconds)
    on_gpu = stage.device.type == "cuda"
    pipeline_group = parallel_state.get_pipeline_model_parallel_group()
    crew = Crew(
        collective=collective,
        transport=ProcessGroupTransport(None if on_gpu else collective.group, timeout_seconds=config.timeout_seconds),
        store=store,
        seat=Seat(
            global_rank=dist.get_rank(),
            pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
            pipeline_ranks=tuple(dist.get_process_group_ranks(pipeline_group)),
            device=torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu"),
        ),
        export=store.export,
        profiler=MegatronProfiler(stage, editor, optimizer),
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
