"""The order of start-up, with a stand-in for Megatron's `pretrain()`; in a rank, as a process parses but once."""

import torch

from megatron_dyn.host import compat, pretrain
from megatron_dyn.host.cpu import CPU_ROWS
from megatron_dyn.host.rows import HOST_ROWS
from megatron_dyn.host.seams import is_applied
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments


def start(device, *flags):
    """Run the entry up to `pretrain()` and return what happened in which order."""
    seen = []

    def add_flag(parser):
        parser.add_argument_group("dynamic balancing").add_argument("--dyn-test", type=int)
        return parser

    def before_training(args):
        seen.append(("before", args.dyn_test, args.dyn_device, args.transformer_impl))
        return lambda: seen.append(("undo", args.dyn_test))

    def run_pretrain(args, *_args, **_options):
        seen.append(("pretrain", args.dyn_test, rows_in_force(CPU_ROWS), rows_in_force(HOST_ROWS), torch.get_num_threads()))

    pretrain.device_from_arguments = lambda _argv: device
    compat.run_pretrain = run_pretrain
    pretrain.main([*tiny_gpt_arguments(), *flags], extra_args_providers=[add_flag], before_training=before_training)
    return seen, rows_in_force(CPU_ROWS) + rows_in_force(HOST_ROWS)


def rows_in_force(rows):
    return sum(is_applied(row) for row in rows)


def test_on_cpu_the_platform_is_in_force_during_the_run_and_only_then():
    assert run_ranks(start, 1, "cpu", "--dyn-test", "3") == [
        ([("before", 3, "auto", "local"), ("pretrain", 3, len(CPU_ROWS), len(HOST_ROWS), 1), ("undo", 3)], 0)
    ]


def test_on_a_gpu_machine_none_of_it_is_ever_in_force():
    ((seen, left),) = run_ranks(start, 1, "cuda", "--dyn-test=4", "--dyn-device=auto")
    assert seen[0] == ("before", 4, "auto", "transformer_engine")
    assert seen[1][:4] == ("pretrain", 4, 0, len(HOST_ROWS))
    assert left == 0
