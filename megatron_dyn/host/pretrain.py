"""The entry behind `pretrain_gpt_dynamic.py`: platform, arguments, then Megatron's own `pretrain()`.

Works with the wheel of megatron-core alone. It knows the order of start-up only: what the plugin does to the job comes
in through `before_training`, its flags through `extra_args_providers`.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from megatron_dyn.host import compat, cpu
from megatron_dyn.host.cpu.bootstrap import rank_environment, set_environment
from megatron_dyn.host.cpu.device import add_device_argument, device_from_arguments
from megatron_dyn.host.cpu.flags import cpu_arguments
from megatron_dyn.host.rows import HOST_ROWS
from megatron_dyn.host.seams import apply

ArgumentsProvider = Callable[[ArgumentParser], ArgumentParser]

UNSUPPORTED_FLAGS = (
    "--dataloader-inter-document-masking",
    "--hybrid-context-parallel",
    "--hybrid-layer-pattern",
    "--inprocess-restart",
    "--logits-load-dir",
    "--perform-rl-step",
    "--sft",
)
"""Flags of Megatron's that ask for another model, task or kind of batch than GPT pretraining."""


def main(
    argv: Sequence[str] | None = None,
    extra_args_providers: Sequence[ArgumentsProvider] = (),
    before_training: Callable[[Namespace], Callable[[], None]] | None = None,
) -> None:
    """Pretrain a GPT with Megatron; every rank of the job calls it, once per process.

    `argv` is the command line without the program's name, `sys.argv[1:]` by default. Each of `extra_args_providers`
    takes the parser and returns it with more flags; `before_training` gets the parsed arguments before Megatron sets
    anything up and returns what takes its own changes back. Ends the process with exit code 2 and one line on stderr
    where `--dyn-device` cannot be had or a flag is not supported here; raises `HostError` where Megatron is not of a
    supported release. At the end torch.distributed is shut down and every change to this process is taken back.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    device = device_from_arguments(words)
    compat.check_version()
    with ExitStack() as stack:
        set_environment(rank_environment(os.environ), stack)
        if device == "cpu":
            stack.enter_context(cpu.activate())
            words, notice = cpu_arguments(words)
            if notice is not None and os.environ["RANK"] == "0":
                sys.stderr.write(f"{notice}\n")
        stack.enter_context(apply(HOST_ROWS))
        args = _parse(words, extra_args_providers, stack)
        with compat.refused_by_name():
            if before_training is not None:
                stack.callback(before_training(args))
            # Not at the top: they import Megatron's training, which the platform has to precede.
            from megatron_dyn.host import gpt, gpt_data

        compat.run_pretrain(
            args,
            gpt_data.train_valid_test_datasets,
            gpt.forward_step,
            get_embedding_ranks=gpt.embedding_ranks,
        )
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _parse(words: Sequence[str], providers: Sequence[ArgumentsProvider], stack: ExitStack) -> Namespace:
    """Let Megatron parse the command line, which it takes from `sys.argv`; that is put back when `stack` closes."""

    def add_flags(parser: ArgumentParser) -> ArgumentParser:
        for provider in providers:
            parser = provider(parser)
        # The plugin's own provider registers the flag in its group; without it the entry still has to know it.
        if parser.get_default("dyn_device") is None:
            add_device_argument(parser.add_argument_group(title="dynamic balancing"))
        _mend_help(parser)
        return parser

    stack.callback(setattr, sys, "argv", sys.argv)
    sys.argv = [sys.argv[0], *words]
    args: Namespace = compat.parse_arguments(add_flags)
    for flag in UNSUPPORTED_FLAGS:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if value:
            sys.stderr.write(
                f"pretrain_gpt_dynamic.py: error: {flag}: expected absent (GPT pretraining only), actual {value}\n"
            )
            raise SystemExit(2)
    return args


def _mend_help(parser: ArgumentParser) -> None:
    """Escape stray percent signs in Megatron's help texts: with one of them `--help` ends in a traceback (0.19.2)."""
    for action in parser._actions:
        try:
            _ = (action.help or "") % {**vars(action), "prog": parser.prog}
        except (TypeError, ValueError, KeyError):
            action.help = str(action.help).replace("%", "%%")
