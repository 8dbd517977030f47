"""What the command refuses. Every command raises it, `main` alone turns it into a line and an exit code."""

from megatron_dyn.config import ConfigError

_RENAMED = {"--dyn-stage-memory-gib": "--memory-gib", "--dyn-": "--"}
"""Flags of a run, and what this command calls them."""


class InputError(ConfigError):
    """Input that cannot be used. The message names file, line and field (or the flag), what was expected and what was found."""


def with_own_flags(text: str) -> str:
    """What the library says about the flags of a run, in the flags of this command."""
    for of_a_run, ours in _RENAMED.items():
        text = text.replace(of_a_run, ours)
    return text
