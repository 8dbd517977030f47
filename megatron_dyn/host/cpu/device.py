"""Choosing the device a run trains on, from the command line and from what torch finds on this machine.

Used by `host.pretrain` before Megatron parses anything, since the CPU platform has to be in force by then. It must not
know what the CPU platform changes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

Device = Literal["cpu", "cuda"]

FLAG = "--dyn-device"


class DeviceError(ValueError):
    """The device asked for is not on this machine; the message is one line for the user."""


def add_device_argument(group: Any) -> None:
    """Register `--dyn-device` on an argparse parser or argument group."""
    group.add_argument(
        FLAG,
        choices=("auto", "cuda", "cpu"),
        default="auto",
        help="Device to train on. auto takes cuda where torch finds a device, else cpu with the gloo backend.",
    )


def choose_device(requested: str, cuda_available: Callable[[], bool] = torch.cuda.is_available) -> Device:
    """Return the device to train on for a value of `--dyn-device` (`auto`, `cuda` or `cpu`).

    Raises `DeviceError` where `cuda` is requested and there is none.
    """
    if requested == "cpu":
        return "cpu"
    if cuda_available():
        return "cuda"
    if requested == "cuda":
        raise DeviceError(f"{FLAG}: expected a CUDA device for 'cuda', actual: torch.cuda.is_available() is False")
    return "cpu"


def device_from_arguments(argv: Sequence[str]) -> Device:
    """Return the device for a whole command line, of which every other flag is ignored.

    Ends the process with exit code 2 and one line on stderr, as argparse does, where the flag's value is wrong or the
    device is not there. Call it on every rank.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    add_device_argument(parser)
    known, _ = parser.parse_known_args(list(argv))
    try:
        return choose_device(known.dyn_device)
    except DeviceError as error:
        parser.error(str(error))
