"""No split is below a floor, and floors are not needlessly low."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.floors import packing_floor, time_floor
from megatron_dyn.plan.exact.tables import tables_of
from megatron_dyn.plan.problem import SplitProblem
from tests.unit.plan.brute_force import PATIENT, REAL_TIMES, SMALL_TIMES, brute_force, problems


@settings(PATIENT, max_examples=60)
@given(problems(SMALL_TIMES | REAL_TIMES, max_layers=7, stages=st.integers(1, 4), chunks=st.integers(1, 5)))
def test_no_split_is_below_a_floor(problem: SplitProblem) -> None:
    """Not even the best of all; and the second floor is never the lower one."""
    best = brute_force(problem)
    if best is not None:
        tables = tables_of(problem)
        ends = tables.ends(best)
        assert ends is not None
        assert time_floor(tables) <= packing_floor(tables) <= tables.peak(ends)


def floors(problem: SplitProblem) -> tuple[float, float]:
    """Both, in seconds."""
    tables = tables_of(problem)
    return tables.seconds(time_floor(tables)), tables.seconds(packing_floor(tables))


def test_each_reason_is_seen() -> None:
    """An even share; a heavy layer on its best stage; a stage that is slow without layers; whole layers only."""
    assert floors(SplitProblem(layer_seconds=(1.0,) * 8, num_stages=4, speeds=(1.0, 1.0, 1.0, 5.0)))[0] == 1.0
    assert floors(SplitProblem(layer_seconds=(1.0, 6.0, 1.0), num_stages=2, first_seconds=1.0))[0] == 6.0
    assert floors(SplitProblem(layer_seconds=(1.0, 1.0), num_stages=2, stage_seconds=(0.0, 7.0)))[0] == 7.0
    assert floors(SplitProblem(layer_seconds=(1.0,) * 9, num_stages=4)) == (2.25, 3.0)
    # Two lighter layers fit 2.125, three layers do not: by number, not by size.
    noisy = (1.0, 1.0625, 1.0, 1.0625, 1.0)
    assert floors(SplitProblem(layer_seconds=noisy, num_stages=2, num_chunks=4)) == (2.5625, 3.0)
    # Five layers of 2 after 1: odd times only, so that a room of 4 is worth 3.
    assert floors(SplitProblem(layer_seconds=(2.0,) * 3, num_stages=2, stage_seconds=(1.0, 1.0))) == (4.0, 5.0)
