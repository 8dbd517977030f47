"""The promise, cell by cell: a run with moves is the run without them, in every bit of loss, norm, parameter and moment."""

import functools

import pytest

from tests.distributed.matrix import CASES, NUM_MOVES, NUM_STEPS, Case
from tests.distributed.plugin_run import Run, run


@functools.cache
def still_run(world_size: int, flags: tuple) -> Run:
    """The run without moves; cases may share one."""
    return run(world_size, **dict(flags))


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.core_matrix if case.core else ()) for case in CASES]
)
def test_a_run_with_random_moves_equals_the_run_without(case: Case):
    still = still_run(case.topology.world_size, tuple(case.still_flags().items()))
    moved = run(case.topology.world_size, **case.moved_flags())

    assert [line["outcome"] for line in moved.rounds] == ["commit"] * NUM_MOVES
    assert len({line["layout"] for line in moved.losses}) >= 3
    assert len(moved.losses) == NUM_STEPS
    assert moved.numbers() == still.numbers()
    assert moved.state == still.state
    assert moved.consumed_samples == still.consumed_samples
    # Clipping was active, or the factor's last bits were never put to the test.
    norms = [float.fromhex(line["grad_norm"]) for line in still.losses if line["grad_norm"] is not None]
    assert sum(norm > case.still_flags()["clip_grad"] for norm in norms) > NUM_STEPS // 2
