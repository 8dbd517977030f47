"""Megatron's GPT pretraining that measures itself and rebalances its pipeline while it runs.

    torchrun --nproc-per-node 2 pretrain_gpt_dynamic.py <Megatron flags> --dyn-rebalance auto

Takes every flag of Megatron's `pretrain_gpt.py` and the `--dyn-*` flags (`--help`, last group). It needs nothing but the
wheel of megatron-core; where a Megatron-LM checkout comes first on the path (because this file lies in it, or by
PYTHONPATH), its `megatron/` is used instead.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Callable

from megatron_dyn.args import add_dyn_args
from megatron_dyn.host.compat import HostError
from megatron_dyn.host.pretrain import main


def install(args: Namespace) -> Callable[[], None]:
    """Put the plugin into the job that is about to start; returns what takes it out again."""
    # Not at the top: it imports Megatron, whose release `main` checks first.
    from megatron_dyn.installer import install_or_exit

    return install_or_exit(args)


if __name__ == "__main__":
    try:
        main(extra_args_providers=[add_dyn_args], before_training=install)
    except HostError as error:
        # The ranks of a job all find the same; one line is enough.
        sys.exit(1 if os.environ.get("RANK", "0") != "0" else f"pretrain_gpt_dynamic.py: error: {error}")
