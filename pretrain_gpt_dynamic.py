"""Megatron's GPT pretraining that measures itself and rebalances its pipeline while it runs.

    torchrun --nproc-per-node 2 pretrain_gpt_dynamic.py <Megatron flags> --dyn-rebalance auto

Takes every flag of Megatron's `pretrain_gpt.py` and the `--dyn-*` flags (`--help`, last group). It needs nothing but the
wheel of megatron-core; where a Megatron-LM checkout comes first on the path (because this file lies in it, or by
PYTHONPATH), its `megatron/` is used instead.
"""

import sys

from megatron_dyn.args import add_dyn_args
from megatron_dyn.host.compat import HostError
from megatron_dyn.host.pretrain import main
from megatron_dyn.installer import install_or_exit

if __name__ == "__main__":
    try:
        main(extra_args_providers=[add_dyn_args], before_training=install_or_exit)
    except HostError as error:
        sys.exit(f"pretrain_gpt_dynamic.py: error: {error}")
