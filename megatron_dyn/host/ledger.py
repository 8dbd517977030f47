"""Every place where the plugin reaches into its host, in one list: what docs/seams.md shows and the contract tests check."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from megatron_dyn.host import checkpoint, grad_norm
from megatron_dyn.host.bare_ranks import BareRanks
from megatron_dyn.host.cpu.async_rows import ASYNC_ROWS
from megatron_dyn.host.cpu.gloo_rows import GLOO_ROWS
from megatron_dyn.host.cpu.megatron_rows import MEGATRON_ROWS
from megatron_dyn.host.cpu.model_rows import MODEL_ROWS
from megatron_dyn.host.cpu.optimizer_rows import OPTIMIZER_ROWS
from megatron_dyn.host.cpu.torch_rows import TORCH_ROWS
from megatron_dyn.host.driver import JobDriver
from megatron_dyn.host.dynamic_life import LAYERS_APART, DynamicLife
from megatron_dyn.host.frozen import FrozenPrefix
from megatron_dyn.host.hooks import StepProfiler
from megatron_dyn.host.layer_rng import LayerStreams
from megatron_dyn.host.rows import HOST_ROWS
from megatron_dyn.host.seams import Seam


def ledger() -> Mapping[str, tuple[Seam, ...]]:
    """The rows by when they are in force. Nothing is applied; the objects behind the wraps are stand-ins."""
    nobody: Any = SimpleNamespace()
    driver = JobDriver(nobody, layout_text="", make_rounds=lambda model, optimizer: nobody, open_losses=None)
    life = DynamicLife(nobody, (), make_job=lambda model, optimizer: nobody, open_log=None)
    return {
        "while layers may move": (*driver.rows(), *checkpoint.rows(nobody), grad_norm.seam()),
        "while a dynamic family is active": life.rows(),
        "while layers may differ in what they carry": (LAYERS_APART,),
        "with --dyn-freeze": (*FrozenPrefix().rows(), *BareRanks().rows()),
        "with --dyn-rng-per-layer": LayerStreams(nobody).rows(),
        "during a sampled step": StepProfiler(nobody, nobody, nobody).seams(),
        "in every run of pretrain_gpt_dynamic.py": HOST_ROWS,
        "on a machine without a GPU: Megatron": (*MEGATRON_ROWS, *MODEL_ROWS, *OPTIMIZER_ROWS, *ASYNC_ROWS),
        "on a machine without a GPU: torch": (*TORCH_ROWS, *GLOO_ROWS),
    }
