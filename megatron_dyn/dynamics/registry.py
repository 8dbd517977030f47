"""All families: their flags, and those of a run, checked against Megatron's arguments and against each other."""

import importlib
from collections.abc import Sequence
from typing import Any

from megatron_dyn.ports import Dynamic

FAMILIES = ("freezing", "pruning", "moe")
"""Subpackages, in the order in which they act at a step boundary. Each has `flags.add_flags(group)` and
`flags.is_on(args)`, and `family.from_args(args)` which may import Megatron."""


def add_family_flags(group: Any) -> None:
    """Add the `--dyn-*` flags of every family to an argparse group."""
    for name in FAMILIES:
        importlib.import_module(f"megatron_dyn.dynamics.{name}.flags").add_flags(group)


def families_from_args(args: Any) -> tuple[Dynamic, ...]:
    """The families that the arguments switch on, checked. Raises ConfigError naming the flag."""
    families: list[Dynamic] = []
    for name in FAMILIES:
        if importlib.import_module(f"megatron_dyn.dynamics.{name}.flags").is_on(args):
            families.append(importlib.import_module(f"megatron_dyn.dynamics.{name}.family").from_args(args))
    check_together(families, args)
    return tuple(families)


def check_together(families: Sequence[Dynamic], args: Any) -> None:
    """Let each family look at Megatron's arguments and at the others. Raises ConfigError naming the flag."""
    for family in families:
        family.check(args, [other.name for other in families if other is not family])
