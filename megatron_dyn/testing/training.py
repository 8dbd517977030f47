"""Tiny training runs for tests: their command line, the run on several ranks, and what each step gave, bit for bit.

Builds on `testing.ranks`; knows of Megatron only where a step ends and what it returns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_dyn.args import add_dyn_args
from megatron_dyn.host.pretrain import main
from megatron_dyn.host.steps import Step, recorded_steps
from megatron_dyn.testing.ranks import run_ranks

TINY_GPT: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_iters": 10,
    "lr": 1e-3,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
    "mock_data": True,
    "num_workers": 0,
    "seed": 1234,
    "log_interval": 1,
    "eval_iters": 0,
    "eval_interval": 1000,
}
"""Flags of the smallest model that still has a pipeline worth balancing, by their names with underscores."""


def tiny_gpt_arguments(**overrides: Any) -> list[str]:
    """Return the command line of a tiny GPT run; keywords are flags of Megatron's, with underscores for dashes.

    True gives a bare switch, None or False leaves the flag out, a list gives several values, anything else one.
    """
    words: list[str] = []
    for name, value in {**TINY_GPT, **overrides}.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.extend(map(str, value if isinstance(value, list | tuple) else [value]))
    return words


def train(
    argv: Sequence[str],
    world_size: int,
    *,
    timeout_seconds: float = 120.0,
    cwd: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    entry: Callable[[Sequence[str]], Any] | None = None,
) -> list[list[Step]]:
    """Train on `world_size` ranks and return the steps of each rank, in order.

    `entry` is called with `argv` on each rank; by default it is the entry of `pretrain_gpt_dynamic.py` without the
    plugin. Raises `RankFailure` where a rank fails or the run takes longer than `timeout_seconds`.
    """
    return run_ranks(
        _train_rank,
        world_size,
        list(argv),
        entry,
        timeout_seconds=timeout_seconds,
        cwd=cwd,
        environment=environment,
    )


def train_with_plugin(argv: Sequence[str]) -> None:
    """Run the entry with the plugin, as `pretrain_gpt_dynamic.py` does: an `entry` for `train`, or a rank's whole work."""
    # Not at the top: it imports Megatron, which the platform that `main` chooses has to precede.
    from megatron_dyn.installer import install_or_exit

    main(argv, extra_args_providers=[add_dyn_args], before_training=install_or_exit)


def losses(steps_by_rank: Sequence[Sequence[Step]]) -> list[str]:
    """Return the loss of each step, in hex, from the last rank, which always holds the last stage."""
    return [str(step.loss) for step in steps_by_rank[-1]]


def _train_rank(argv: list[str], entry: Callable[[Sequence[str]], Any] | None) -> list[Step]:
    with recorded_steps() as steps:
        try:
            (entry or main)(argv)
        except SystemExit as end:
            # Megatron leaves this way after --exit-interval; any other code is a failure of the rank.
            if end.code:
                raise
    return steps
