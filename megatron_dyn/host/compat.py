"""Which Megatron-core this is, whether it is one we support, and the few calls that differ between its releases.

Asked by `seams` (to name the host in an error), by `pretrain` and by `install`. It knows releases and symbols only: it
must not know what any seam does with a symbol, and importing it must not import Megatron.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

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


def missing_symbols(targets: Iterable[str]) -> list[str]:
    """Return those of the targets (`package.module:attribute.path`) the installed Megatron does not have, in order."""
    missing = []
    for target in targets:
        try:
            resolve(target)
        except HostError:
            missing.append(target)
    return missing


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
