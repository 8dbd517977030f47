"""Types of command-line values for argparse, each with one clear refusal. Shared by all commands; knows none of them."""

import argparse
import math
from collections.abc import Callable

MAX_STAGES = 16_384
"""Pipeline stages that a command plans for. This limit and the next ones are beyond any job; without them a typing error
would be computed for hours, or until the memory is full."""
MAX_CHUNKS = 65_536
"""Stages times virtual stages."""
MAX_MICROBATCHES = 65_536
"""Micro-batches of a step."""
MAX_STEPS = 1_000_000
"""Iterations of a run."""
MAX_LAYERS = 100_000
"""Decoder layers, as in timing files."""


def positive_int(text: str) -> int:
    """A whole number of at least 1; raises ArgumentTypeError, which argparse prints with the flag's name."""
    return up_to(999_999_999)(text)


def up_to(most: int) -> Callable[[str], int]:
    """The type of a whole number from 1 to `most`; it raises ArgumentTypeError."""

    def convert(text: str) -> int:
        if not text.isascii() or not text.isdecimal() or len(text) > 9 or not 1 <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number from 1 to {most}, got {text!r}")
        return int(text)

    return convert


def count(text: str) -> int:
    """A whole number of at least 0; raises ArgumentTypeError."""
    if not text.isascii() or not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 to 999999999, got {text!r}")
    return int(text)


def fraction(text: str) -> float:
    """A number from 0 to below 1; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a fraction in [0, 1), got {text!r}")
    return value


def positive_number(text: str) -> float:
    """A finite number above 0; raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {text!r}")
    return value
