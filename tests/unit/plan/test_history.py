"""What moves are expected to cost: an assumption at first, then what was measured."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import ASSUMED_FIXED_SECONDS, MoveHistory

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def test_an_estimate_before_any_move_is_the_documented_assumption() -> None:
    """A fixed second and a gigabyte a second."""
    assert MoveHistory().estimate(0) == ASSUMED_FIXED_SECONDS
    assert MoveHistory().estimate(3 * 10**9) == ASSUMED_FIXED_SECONDS + 3.0


def test_an_estimate_follows_the_slowest_of_the_last_three_moves() -> None:
    """In proportion to the assumption; a slow first move is forgotten after three others."""
    history = MoveHistory().observe(moved_bytes=10**9, seconds=20.0)
    assert history.estimate(10**9) == 20.0
    assert history.estimate(3 * 10**9) == 40.0
    for seconds in (1.0, 4.0, 2.0):
        history = history.observe(moved_bytes=10**9, seconds=seconds)
    assert history.estimate(10**9) == 4.0


@PATIENT
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0.0, 1e4)), max_size=5), st.integers(0, 10**12))
def test_an_estimate_grows_with_the_bytes(moves: list[tuple[int, float]], moved_bytes: int) -> None:
    """And is never negative; observing changes the copy only."""
    history = MoveHistory()
    for size, seconds in moves:
        history = history.observe(moved_bytes=size, seconds=seconds)
    assert history.observations == tuple(moves)
    assert 0.0 <= history.estimate(moved_bytes) <= history.estimate(moved_bytes + 10**9)


@pytest.mark.parametrize(("moved_bytes", "seconds"), [(-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_an_impossible_observation_is_refused(moved_bytes: int, seconds: float) -> None:
    """The message holds both numbers."""
    with pytest.raises(ValueError, match=f"got {moved_bytes} bytes and {seconds} s"):
        MoveHistory().observe(moved_bytes=moved_bytes, seconds=seconds)
