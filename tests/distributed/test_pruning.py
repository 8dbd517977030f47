"""Pruning on real ranks: exact over TP, PP, DP and EP; moves and a resume in the middle leave no trace; zeros stay zeros."""

import numpy as np
import pytest
import torch

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.matrix import BF16, MOE, OVERLAP, SHARDED, TINY
from tests.distributed.plugin_run import run, run_to_exit, train
from tests.distributed.pruning_run import train_and_watch

FLAGS = {
    **TINY,
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|ttL",
    "global_batch_size": 2,
    "train_iters": 10,
    "lr_warmup_iters": 0,
    "weight_decay": 0.1,
}
PRUNE = {"dyn_prune": True, "dyn_prune_start": 1, "dyn_prune_end": 8, "dyn_prune_every": 2, "dyn_prune_final": 0.8}
LEVELS = [1 - (1 - passed / 7) ** 3 for passed in (2, 4, 6, 7)]
MOVES = "2:Et|tttL;4:Ettt|tL;7:Ett|ttL"


def what_was_done(run):
    """The changes of a run without what was timed."""
    return [{key: value for key, value in change.items() if key != "choosing_seconds"} for change in run.changes]


@pytest.fixture(scope="module")
def still():
    """No moves, no stop, a sparse kernel forced."""
    return run(2, **FLAGS, **PRUNE, dyn_prune_kernels="csr")


def test_the_schedule_is_kept_and_its_end_reached(still):
    assert [change["iteration"] for change in still.changes] == [3, 5, 7, 8]
    assert [change["level"] for change in still.changes] == pytest.approx([0.8 * level for level in LEVELS])
    num_weights = still.changes[-1]["num_weights"]
    assert [change["num_kept"] for change in still.changes] == [
        num_weights - round(change["level"] * num_weights) for change in still.changes
    ]


def test_moves_in_the_middle_change_no_bit(still):
    moved = run(2, **FLAGS, **PRUNE, dyn_prune_kernels="csr", dyn_layout_at=MOVES)
    assert [line["outcome"] for line in moved.rounds] == ["commit"] * 3
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state
    assert what_was_done(moved) == what_was_done(still)
    assert len([name for name in moved.state if "dyn_prune" in name]) == 4 * FLAGS["num_layers"]


def test_moves_change_no_bit_with_overlapped_shards_in_bf16():
    flags = {
        **FLAGS,
        **PRUNE,
        **BF16,
        **OVERLAP,
        "dyn_prune_kernels": "dense",
        "dyn_prune_pattern": "2:4",
        "dyn_prune_final": 0.5,
    }
    without = run(4, **flags)
    moved = run(4, **flags, dyn_layout_at=MOVES)
    assert moved.numbers() == without.numbers()
    assert moved.state == without.state
    assert what_was_done(moved) == what_was_done(without)


def test_a_moved_run_that_is_stopped_and_resumed_goes_on_as_if_it_had_not(still, tmp_path):
    flags = {**FLAGS, **PRUNE, **SHARDED, "dyn_prune_kernels": "csr", "ckpt_format": "torch_dist"}
    flags |= {"dist_ckpt_optim_fully_reshardable": True, "dyn_layout_at": MOVES}
    ended = run_to_exit(2, train, save=str(tmp_path), save_interval=6, exit_interval=6, **flags, dyn_exact_grad_norm=True)
    assert [result.exitcode for result in ended] == [0, 0], ended[0].output[-2000:]
    resumed = run(2, load=str(tmp_path), **flags)
    assert resumed.numbers() == still.numbers()[6:]
    assert what_was_done(resumed) == what_was_done(still)[2:]


def test_what_is_frozen_is_not_pruned_and_moves_change_no_bit():
    """Layer 0 trains from step 5 on, layer 3 until then; both optimizers drop and make state while masks are in force."""
    flags = {**FLAGS, **PRUNE, **SHARDED, "dyn_prune_kernels": "dense", "dyn_freeze": '{"0": [0, 4], "3": [4, -1]}'}
    without = run(2, **flags)
    moved = run(2, **flags, dyn_layout_at=MOVES)
    assert moved.numbers() == without.numbers()
    assert moved.state == without.state
    assert what_was_done(moved) == what_was_done(without)
    first, *_, last = [change["sparsity_by_layer"] for change in without.changes if change["family"] == "prune"]
    assert first[0] == 0.0 < first[3]
    assert first[3] == last[3] < last[0]


def test_pruning_can_begin_at_a_checkpoint_that_knows_nothing_of_it(tmp_path):
    flags = {**FLAGS, "ckpt_format": "torch_dist"}
    ended = run_to_exit(2, train, save=str(tmp_path), save_interval=4, exit_interval=4, **flags)
    assert [result.exitcode for result in ended] == [0, 0], ended[0].output[-2000:]
    resumed = run(2, load=str(tmp_path), **flags, **PRUNE)
    # What was due at step 3 is made up for after the first step.
    assert [change["iteration"] for change in resumed.changes] == [5, 7, 8]
    assert resumed.changes[-1]["level"] == 0.8


CASES = {
    "tensor and sequence parallel, sparse kernels": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "dyn_prune_kernels": "csr",
    },
    "replicas, experts over ranks, bf16": {**MOE, **BF16, "dyn_prune_scope": "layer", "dyn_prune_kernels": "dense"},
}


def joined(steps_of_ranks, choose):
    """(weights before, masks after) of one step over all ranks, in the order of their keys, of those that `choose` takes."""
    everywhere = {}
    for found in steps_of_ranks:
        assert not found.keys() & everywhere.keys(), "two ranks speak for one weight"
        everywhere |= found
    pairs = [pair for key, pair in sorted(everywhere.items()) if choose(key)]
    return (torch.from_numpy(np.concatenate(parts)) for parts in zip(*pairs, strict=True))


@pytest.fixture(scope="module", params=CASES)
def watched(request):
    flags = {**FLAGS, **PRUNE, **CASES[request.param]}
    return flags, run_ranks(train_and_watch, 4, tiny_gpt_arguments(**flags))


def test_exactly_the_largest_weights_of_all_ranks_stay(watched):
    flags, ranks = watched
    scopes = [{layer} for layer in range(4)] if flags.get("dyn_prune_scope") == "layer" else [set(range(4))]
    for index, level in enumerate(LEVELS):
        steps = [rank["steps"][index] for rank in ranks]
        for layers in scopes:
            weights, masks = joined(steps, lambda key, layers=layers: key[0] in layers)
            num_kept = len(weights) - round(0.8 * level * len(weights))
            assert int(masks.sum()) == num_kept
            largest = weights.abs().topk(num_kept).values.sort().values
            assert torch.equal(weights[masks].abs().sort().values, largest)


def test_what_was_pruned_is_still_zero_at_the_end(watched):
    _, ranks = watched
    assert [rank["revived"] for rank in ranks] == [[]] * 4
    assert all(rank["num_weights"] >= 8 for rank in ranks)


def test_sparse_kernels_train_as_dense_ones_do_under_tensor_parallelism():
    """In fp32 sums in another order differ in their last bits only, and 10 steps do not let that grow."""
    flags = {**FLAGS, **PRUNE, **CASES["tensor and sequence parallel, sparse kernels"]}
    sparse = run(4, **flags, dyn_layout_at=MOVES)
    dense = run(4, **flags | {"dyn_prune_kernels": "dense"})
    for ours, theirs in zip(sparse.numbers(), dense.numbers(), strict=True):
        assert float.fromhex(ours[1]["lm loss"]) == pytest.approx(float.fromhex(theirs[1]["lm loss"]), rel=1e-5)
        assert float.fromhex(ours[2]) == pytest.approx(float.fromhex(theirs[2]), rel=1e-4)
    assert sparse.numbers() != dense.numbers()
