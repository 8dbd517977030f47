"""The composition root: puts the plugin into a Megatron job that has parsed its arguments, and takes it out again.

Everything is made here and handed down; no module below asks for a global. Off means absent: with nothing to do, no seam
is applied.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from rich.console import Console

from megatron_dyn.args import config_from_args
from megatron_dyn.config import ConfigError, DynConfig
from megatron_dyn.controller import Controller, Crew
from megatron_dyn.dynamics import families_from_args
from megatron_dyn.host import checkpoint, grad_norm
from megatron_dyn.host.bare_ranks import BareRanks
from megatron_dyn.host.compat import HostError, check_host
from megatron_dyn.host.driver import JobDriver
from megatron_dyn.host.dynamic_job import MegatronJob
from megatron_dyn.host.dynamic_life import DynamicLife
from megatron_dyn.host.frozen import FrozenPrefix
from megatron_dyn.host.layer_rng import LayerStreams
from megatron_dyn.host.layout import check_built, layout_of_args, stamp
from megatron_dyn.host.ledger import ledger
from megatron_dyn.host.memory import PeakMemory
from megatron_dyn.host.profiler import MegatronProfiler
from megatron_dyn.host.seams import Seam, Undo, apply
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.host.support import (
    check_dynamic,
    check_exact_grad_norm,
    check_measurable,
    check_rng_per_layer,
    check_support,
    randomness_notice,
)
from megatron_dyn.host.transport import make_transport
from megatron_dyn.host.workplace import Opening
from megatron_dyn.migrate import Seat
from megatron_dyn.ports import Dynamic, Sink
from megatron_dyn.records import Layout, LayoutError
from megatron_dyn.report import ChangeLog, JsonlSink, LossLog, ReportError, TableSink, check_directory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installation:
    """What was put in. `undo()` takes it out; afterwards the host is as before."""

    config: DynConfig
    seams: tuple[Seam, ...]
    """The ledger rows in force; empty when the plugin is off."""
    undo: Undo
    families: tuple[Dynamic, ...] = ()
    """The dynamic families that change the model while it trains."""
    request: Callable[[str], None] | None = None
    """`request(layout)`, in Megatron's layout syntax, brings a layout in force at the next step boundary, never within a step.

    To be called on all ranks with the same layout, while training runs; the last request before the boundary counts. None
    when layers cannot move in this run. Raises LayoutError, or ValueError for a layout that this run cannot go to.
    """


def install(args: Any, config: DynConfig | None = None, families: Sequence[Dynamic] | None = None) -> Installation:
    """Put the plugin into this rank's job. All ranks must call, after Megatron validated `args`, before `pretrain`.

    `config` None reads the `--dyn-*` values from `args`. `families` are what changes the model while it trains; None: those
    of the flags where `config` is, too, else none. Raises ConfigError, naming the flag, for what cannot be honoured, and
    HostError, naming all that is missing, for a Megatron-core that is not supported.
    """
    if families is None:
        families = families_from_args(args) if config is None else ()
    config = config_from_args(args) if config is None else config
    config = _with_known_changes(args, config, families)
    if config.report_dir is not None:
        check_directory(config.report_dir)
    seams: list[Seam] = []
    request: Callable[[str], None] | None = None
    workshop = _Workshop(args, config, families)
    if families:
        check_dynamic(args, [family.name for family in families])
        seams += workshop.life.rows()
        for part in (workshop.prefix, workshop.bare):
            seams += () if part is None else part.rows()
    if config.moves_possible:
        _check_moves(args, config)
        _settle_layout(args, config)
        if config.rebalances:
            check_measurable(_layout_of_flags(args))
        seams += checkpoint.rows(args)
    if config.moves_possible or config.record_losses or families:
        driver = workshop.driver(_layout_of_flags(args))
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
    return Installation(config=config, seams=tuple(seams), undo=apply(seams), families=tuple(families), request=request)


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


def _with_known_changes(args: Any, config: DynConfig, families: Sequence[Dynamic]) -> DynConfig:
    """The settings with what only the host and the families know: the group size, and the steps at which costs change."""
    known = {step for family in families for step in family.cost_changes() if step > 0}
    decide = replace(
        config.decide,
        group_size=getattr(args, "microbatch_group_size_per_vp_stage", None),
        cost_changes_at=tuple(sorted({*config.decide.cost_changes_at, *known})),
    )
    return replace(config, decide=decide)


class _Workshop:
    """What is made of the settings once model and optimizer exist."""

    def __init__(self, args: Any, config: DynConfig, families: Sequence[Dynamic]) -> None:
        self._args, self._config = args, config
        self._families = tuple(families)
        freezes = any(family.freezes for family in families)
        self.prefix = FrozenPrefix() if freezes else None
        self.bare = BareRanks() if freezes else None
        self.life = DynamicLife(
            args,
            families,
            make_job=lambda model, optimizer: MegatronJob(self._open(model, optimizer), self.prefix, self.bare),
            open_log=(lambda: ChangeLog(config.report_dir, Console(file=sys.stdout))) if _is_first_rank() else None,
        )
        self._open = Opening(args, timeout_seconds=config.timeout_seconds, dress=self.life.dress)

    def driver(self, layout: Layout) -> JobDriver:
        config = self._config
        make_rounds: Callable[[list[Any], Any], Controller] | None = None
        open_losses: Callable[[], LossLog] | None = None
        if config.moves_possible:
            forced = config.forced_layouts(built=layout)

            def make_rounds(model: list[Any], optimizer: Any) -> Controller:
                return self._controller(layout, forced, model, optimizer)

        if config.record_losses and config.report_dir is not None:
            directory = config.report_dir

            def open_losses() -> LossLog:
                return LossLog(directory)

        return JobDriver(
            self._args,
            layout_text=layout.text,
            make_rounds=make_rounds,
            open_losses=open_losses,
            life=self.life if self._families else None,
        )

    def _controller(self, layout: Layout, forced: dict[int, Layout], model: list[Any], optimizer: Any) -> Controller:
        """Everything a round works with. All ranks together."""
        args, config, workplace = self._args, self._config, self._open(model, optimizer)
        stage, collective = workplace.stage, workplace.collective
        check_built(layout, tuple(stage.layers))
        store = MegatronLayerStore(stage, workplace.editor, args)
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
            profiler=MegatronProfiler(stage, workplace.editor, optimizer, notes=self.life.notes),
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
