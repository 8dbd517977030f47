"""Dropout: with a stream for every layer, moves and recomputation change no bit; without, they do."""

import pytest

from tests.distributed.plugin_run import run

STEPS = {
    "num_layers": 4,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 6,
    "clip_grad": 0.5,
}
PP2 = STEPS | {"pipeline_model_parallel_size": 2}
DROPOUT = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
MOVES = {"dyn_layout_at": "1:Et*3|tL;3:Et|t*3L;4:Et*2|t*2L"}
PER_LAYER = {"dyn_rng_per_layer": True}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module")
def still():
    """The run that stays where it is, its layers with streams of their own."""
    return run(2, **PP2, **DROPOUT, **PER_LAYER)


@pytest.mark.parametrize(
    "more",
    [
        pytest.param({"eval_interval": 2, "eval_iters": 1}, id="plain-and-evaluation"),
        pytest.param(RECOMPUTE, id="uniform"),
        pytest.param(RECOMPUTE | {"recompute_method": "block"}, id="block"),
        pytest.param({"recompute_granularity": "selective"}, id="selective"),
    ],
)
def test_moves_and_recomputation_equal_the_run_without_either(still, more):
    moved = run(2, **PP2, **DROPOUT, **PER_LAYER, **MOVES, **more)
    assert [line["outcome"] for line in moved.rounds] == ["commit"] * 3
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state


def test_virtual_stages_recompute_what_they_ran():
    """Two chunks on each rank take turns, and their backwards come in another order than their forwards."""
    flags = PP2 | DROPOUT | PER_LAYER | {"num_virtual_stages_per_pipeline_rank": 2}
    assert run(2, **flags, **RECOMPUTE).numbers() == run(2, **flags).numbers()


def test_without_the_flag_a_move_changes_the_losses():
    stays, moved = run(2, **PP2, **DROPOUT), run(2, **PP2, **DROPOUT, **MOVES)
    assert moved.numbers()[0] == stays.numbers()[0]
    assert all(one != other for one, other in zip(moved.numbers()[1:], stays.numbers()[1:], strict=True))


def test_dropout_happens_and_the_flag_alone_changes_nothing(still):
    plain = run(2, **PP2)
    flagged = run(2, **PP2, **PER_LAYER)
    assert flagged.numbers() == plain.numbers()
    assert flagged.state == plain.state
    assert all(one != other for one, other in zip(still.numbers(), plain.numbers(), strict=True))
