"""Installed and off is stock Megatron: no seam, no wrapper, the same numbers in every bit."""

import importlib

from megatron_dyn.host.seams import MARK
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import losses, tiny_gpt_arguments, train
from tests.distributed.plugin_run import run
from tests.distributed.plugin_run import train as train_with_plugin

FLAGS = {"pipeline_model_parallel_size": 2, "train_iters": 8, "clip_grad": 0.5}
WATCHED = {
    "megatron.training.training": ("train", "train_step", "post_training_step_callbacks", "setup_model_and_optimizer"),
    "megatron.core.pipeline_parallel.schedules": ("forward_step", "backward_step", "deallocate_output_tensor"),
    "megatron.core.optimizer.optimizer": ("get_grad_norm_fp32",),
}


def marked_after_install(argv: list[str]) -> list[str]:
    """Names of Megatron's functions that are wrapped while the first step runs, besides the test's own look."""
    found: list[str] = []
    training = importlib.import_module("megatron.training.training")
    original = training.setup_model_and_optimizer

    def look(*args, **kwargs):
        for module, names in WATCHED.items():
            found.extend(f"{module}.{name}" for name in names if hasattr(getattr(importlib.import_module(module), name), MARK))
        return original(*args, **kwargs)

    training.setup_model_and_optimizer = look
    train_with_plugin(argv)
    return found


def test_off_adds_no_wrapper():
    argv = tiny_gpt_arguments(**FLAGS | {"train_iters": 2})
    assert run_ranks(marked_after_install, 2, argv) == [[], []]


def test_on_adds_the_wrappers_so_that_the_test_above_can_fail():
    argv = tiny_gpt_arguments(**FLAGS, dyn_rebalance="auto")
    found = run_ranks(marked_after_install, 2, argv)
    assert "megatron.training.training.train_step" in found[0]
    assert "megatron.core.optimizer.optimizer.get_grad_norm_fp32" in found[1]


def test_off_gives_the_numbers_of_stock_megatron():
    stock = train(tiny_gpt_arguments(**FLAGS), 2)
    off = train(tiny_gpt_arguments(**FLAGS, dyn_rebalance="off"), 2, entry=train_with_plugin)
    assert losses(off) == losses(stock)
    assert [step.grad_norm for step in off[0]] == [step.grad_norm for step in stock[0]]


def test_recording_losses_changes_nothing():
    stock = train(tiny_gpt_arguments(**FLAGS), 2)
    recorded = run(2, **FLAGS, dyn_exact_grad_norm=False)
    assert [line["losses"]["lm loss"] for line in recorded.losses] == losses(stock)
    assert [line["grad_norm"] for line in recorded.losses] == [step.grad_norm for step in stock[1]]
    assert {line["layout"] for line in recorded.losses} == {"Et*4|t*4L"}
    assert recorded.rounds == []


def test_measuring_changes_nothing():
    """Hooks look and never touch: a run that measures and decides, but never moves, equals one that does not."""
    still = run(2, **FLAGS, bf16=True)
    watched = run(2, **FLAGS, bf16=True, dyn_rebalance="every:3", dyn_profile_warmup=0, dyn_min_gain=0.99)
    assert [line["outcome"] for line in watched.rounds] == ["no_change"] * 2
    assert watched.numbers() == still.numbers()
    assert watched.state == still.state
