"""megatron_dyn: measures a running Megatron-core pipeline, re-splits its layers over the stages, and moves them live.

The names below are the public API. `install` needs Megatron and is imported on first use, so that the planner can be
used on a machine that has neither Megatron nor torch.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from megatron_dyn.config import ConfigError, DynConfig
from megatron_dyn.plan import best_split, decide, simulate
from megatron_dyn.records import Layout, RoundReport, Snapshot

if TYPE_CHECKING:
    from megatron_dyn.args import add_dyn_args
    from megatron_dyn.installer import Installation, install

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DynConfig",
    "Installation",
    "Layout",
    "RoundReport",
    "Snapshot",
    "add_dyn_args",
    "best_split",
    "decide",
    "install",
    "simulate",
]

_HOMES = {"Installation": "megatron_dyn.installer", "add_dyn_args": "megatron_dyn.args", "install": "megatron_dyn.installer"}


def __dir__() -> list[str]:
    """The public names, the lazy ones too."""
    return __all__


def __getattr__(name: str) -> Any:  # noqa: ANN401 - it answers with whatever lives under the name
    """Import what needs Megatron when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(_import_module(_HOMES[name]), name)
    except ImportError:
        with _import_module("megatron_dyn.host.compat").refused_by_name():
            raise
