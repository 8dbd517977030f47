"""Which Megatron-core this is, whether it is one we support, and the few calls that differ between its releases.

Asked by `seams` (to name the host in an error), by `pretrain`, by `install` and by the package root. It knows releases
and symbols only: it must not know what any seam does with a symbol, and importing it must not import Megatron.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

SUPPORTED_LOWEST = (0, 17)
"""First megatron-core release (major, minor) the plugin supports."""

SUPPORTED_BELOW = (0, 20)
"""First megatron-core release (major, minor) the plugin does not support."""

ARGUMENT_DEFAULTS = {"tokenizer_type": "GPT2BPETokenizer"}
"""Values for flags of Megatron's that the user left out."""

SUPPORTED_RANGE = "0.17 <= megatron-core < 0.20"
"""The supported range as it is written in messages."""


class HostError(RuntimeError):
    """Megatron-core is missing, is of a release we do not support, or lacks a symbol we rely on."""


class Reliance(Protocol):
    """What the plugin relies on in its host: a row of the ledger, as far as this module has to know one."""

    @property
    def target(self) -> str:
        """The attribute, as `package.module:attribute.path`."""

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names that its signature must contain; empty means that it is not checked."""


def megatron_version() -> str:
    """Return the version of the Megatron-core that `import megatron.core` finds.

    Read from the package itself and not from installed metadata, since inside a Megatron-LM checkout a local
    `megatron/` folder hides the wheel. Raises `HostError` where there is no Megatron-core.
    """
    try:
        return str(importlib.import_module("megatron.core.package_info").__version__)
    except ModuleNotFoundError as error:
        raise HostError(f"megatron-core: expected {SUPPORTED_RANGE}, actual: not installed ({error})") from error


def describe_host() -> str:
    """Return `megatron-core 0.19.2, supported 0.17 <= megatron-core < 0.20`, for error messages; raises nothing."""
    try:
        version = megatron_version()
    except HostError:
        version = "not installed"
    return f"megatron-core {version}, supported {SUPPORTED_RANGE}"


def is_supported(version: str) -> bool:
    """Return whether a version string such as `0.19.2` or `0.18.0rc1` lies in the supported range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and SUPPORTED_LOWEST <= (int(found[1]), int(found[2])) < SUPPORTED_BELOW


def check_version() -> str:
    """Return the installed version, or raise `HostError` naming it and the range; call it before applying a seam."""
    version = megatron_version()
    if not is_supported(version):
        raise HostError(f"megatron-core: expected {SUPPORTED_RANGE}, actual {version}")
    return version


def check_host(rows: Iterable[Reliance]) -> str:
    """Return the installed version, or raise `HostError`: one line with the version, the range and all that is missing.

    Imports the modules of the rows; applies nothing. The installer calls it on every rank before anything is changed.
    """
    version, missing = megatron_version(), missing_from_host(rows)
    if is_supported(version) and not missing:
        return version
    told = f"; missing in it: {', '.join(missing)}" if missing else ""
    raise HostError(f"megatron-core: expected {SUPPORTED_RANGE}, actual {version}{told}")


@contextmanager
def refused_by_name() -> Iterator[None]:
    """Turn an ImportError about Megatron in the block into a `HostError` with version, range and what is missing.

    For the imports at the top of our own modules, which fail before any row of the ledger can be checked. Other
    import errors pass as they are.
    """
    try:
        yield
    except ImportError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise HostError(f"megatron-core: expected {SUPPORTED_RANGE}, actual {megatron_version()}; {error}") from error


def resolve(target: str) -> tuple[Any, str]:
    """Return (owner, attribute name) of a target `package.module:attribute.path`, importing its module.

    Raises `HostError` naming the target and the host where the target is malformed or any part of it does not exist.
    """
    module_name, separator, path = target.partition(":")
    if not (module_name and separator and path):
        raise HostError(f"target {target!r}: expected 'package.module:attribute.path'")
    try:
        owner: Any = importlib.import_module(module_name)
        *parents, name = path.split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise HostError(f"target {target!r} does not exist ({error}); {describe_host()}") from error
    return owner, name


def missing_from_host(rows: Iterable[Reliance]) -> list[str]:
    """Return what of the rows the installed Megatron does not have, in order and once: `module:name`, or, where only
    parameters are missing, `module:name(first, second)`.
    """
    missing: dict[str, None] = {}
    for row in rows:
        try:
            owner, name = resolve(row.target)
            lacking = missing_parameters(getattr(owner, name), row.parameters)
        except HostError:
            missing[row.target] = None
        else:
            if lacking:
                missing[f"{row.target}({', '.join(lacking)})"] = None
    return list(missing)


def missing_parameters(function: Any, names: Iterable[str]) -> list[str]:
    """Return those of the names that the signature of `function` does not have, in order; all where it has none.

    A wrapper that keeps `__wrapped__` counts as what it wraps.
    """
    try:
        actual = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return list(names)
    return [name for name in names if name not in actual]


def call_supported(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call `function` with those of the keyword options that the installed release knows; the others are dropped.

    For options whose absence means what we pass: one that was added later with our value as its behaviour before.
    """
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in options.items() if name in known})


def parse_arguments(extra_args_provider: Callable[[Any], Any]) -> Any:
    """Parse `sys.argv` with Megatron's parser and return its namespace, validated. A process may do this once."""
    from megatron.training import arguments

    if hasattr(arguments, "parse_and_validate_args"):
        return arguments.parse_and_validate_args(extra_args_provider=extra_args_provider, args_defaults=ARGUMENT_DEFAULTS)
    from megatron_dyn.host import legacy

    return legacy.parse_arguments(extra_args_provider, ARGUMENT_DEFAULTS)


def run_pretrain(args: Any, datasets: Callable[..., Any], forward_step: Callable[..., Any], **options: Any) -> None:
    """Call Megatron's `pretrain()` for a GPT built from `args`, as the installed release wants it; every rank calls it.

    `options` are further keyword arguments of `pretrain()`.
    """
    from megatron.core.enums import ModelType
    from megatron.training import argument_utils
    from megatron.training.training import pretrain

    options |= {
        "train_valid_test_dataset_provider": datasets,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if hasattr(argument_utils, "gpt_config_from_args"):
        model = argument_utils.gpt_config_from_args(args)
        pretrain(cfg_container=argument_utils.pretrain_cfg_container_from_args(args, model), **options)
        return
    from megatron_dyn.host import legacy

    with legacy.parsed_already(args):
        make_container = getattr(argument_utils, "pretrain_cfg_container_from_args", lambda _args: None)
        call_supported(pretrain, cfg_container=make_container(args), model_provider=legacy.gpt_model, **options)
