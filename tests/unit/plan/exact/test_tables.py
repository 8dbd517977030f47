"""Integer tables say the same of a split as exact fractions do."""

from fractions import Fraction
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.tables import Rate, legal_cuts, tables_of, with_ties
from megatron_dyn.plan.problem import SplitProblem
from tests.unit.plan.brute_force import PATIENT, REAL_TIMES, all_counts, is_allowed, moved, peak, peak_bytes, problems


@PATIENT
@given(st.integers(1, 2**60), st.integers(1, 2**60), st.integers(0, 2**60), st.integers(0, 2**62))
def test_a_rate_and_its_inverse_agree(numerator: int, denominator: int, load: int, bound: int) -> None:
    """A load takes at most a time exactly when it is at most the load within it: no split is judged in two ways."""
    rate = Rate(numerator, denominator)
    assert (rate.time(load) <= bound) == (load <= rate.load_within(bound))


@settings(PATIENT, max_examples=60)
@given(problems(REAL_TIMES, max_layers=6, stages=st.integers(1, 3), chunks=st.integers(1, 5)))
def test_every_split_is_described_as_by_brute_force(problem: SplitProblem) -> None:
    """Time, bytes, moves and permission of all splits."""
    tables = tables_of(problem)
    weights = problem.moved_bytes or (1,) * len(problem.layer_seconds)
    for counts in all_counts(len(problem.layer_seconds), problem.num_runs, 0):
        ends = tables.ends(counts)
        if ends is None:
            assert not is_allowed(problem, counts)
            continue
        assert tables.counts(ends) == counts
        assert tables.seconds(tables.peak(ends)) == pytest.approx(float(peak(problem, counts)), rel=1e-13)
        assert max(tables.bytes_held(ends)[: len(counts)]) == peak_bytes(problem, counts)
        assert tables.moved(ends) == sum(weights[layer] for layer in moved(problem, counts))
        may_be = is_allowed(problem, counts) and min(counts) >= problem.min_layers
        assert tables.allows(ends, tables.longest()) == may_be
        assert not tables.allows(ends, tables.peak(ends) - 1)


@PATIENT
@given(st.data(), st.integers(0, 8))
def test_cuts_leave_together_what_must_be(data: st.DataObject, num_layers: int) -> None:
    """Pins and uncut layers, by going through the boundaries."""
    pinned_first = data.draw(st.integers(0, num_layers))
    pinned_last = data.draw(st.integers(0, num_layers - pinned_first))
    uncut = tuple(data.draw(st.sets(st.integers(1, num_layers - 1)))) if num_layers > 1 else ()
    problem = SplitProblem(
        layer_seconds=(1.0,) * num_layers, num_stages=2, uncut=uncut, pinned_first=pinned_first, pinned_last=pinned_last
    )
    inner = [
        cut
        for cut in range(1, num_layers)
        if cut not in uncut and not cut < pinned_first and not cut > num_layers - pinned_last
    ]
    assert legal_cuts(problem).tolist() == sorted({0, num_layers, *inner})


def test_the_weight_held_is_that_of_the_current_stage() -> None:
    """Stage 0 holds chunks 0 and 2, so layers 0, 3 and 4, of which 3 cannot be cut from 2."""
    problem = SplitProblem(
        layer_seconds=(1.0,) * 5, num_stages=2, num_chunks=3, current=(1, 2, 2), moved_bytes=(1, 2, 4, 8, 16), uncut=(3,)
    )
    tables = tables_of(problem)
    assert tables.cuts.tolist() == [0, 1, 2, 4, 5]
    assert tables.held(0).tolist() == [0, 1, 1, 9, 25]
    assert tables.held(1).tolist() == [0, 0, 2, 6, 6]


@PATIENT
@given(st.floats(1e-9, 1e9))
def test_time_within_is_the_inverse_of_seconds(seconds: float) -> None:
    """To less than a unit."""
    tables = tables_of(SplitProblem(layer_seconds=(3.0, 4.0), num_stages=2, speeds=(3.0, 0.25)))
    unit = Fraction(2) ** tables.unit_exponent
    assert 0 <= Fraction(seconds) - tables.time_within(seconds) * unit < unit


@PATIENT
@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30), st.floats(1e-6, 1e6))
def test_sums_fit_in_64_bits(times: list[float], speed: float) -> None:
    """Whatever the speeds, loads stay below 2**61, and each item keeps its size to a part in 10**12 of all."""
    tables = tables_of(SplitProblem(layer_seconds=tuple(times), num_stages=2, speeds=(1.0, speed)))
    assert tables.prefix == tuple(np.array(tables.prefix, dtype=np.int64).tolist())
    assert 0 < tables.prefix[-1] < 2**61
    total = sum(times)
    shares = [(end - start) / tables.prefix[-1] for start, end in pairwise(tables.prefix)]
    assert shares == pytest.approx([time / total for time in times], abs=1e-12)
    assert list(accumulate(tables.items, initial=0)) == list(tables.prefix)


def test_ties_are_one_part_in_a_million_millions() -> None:
    """No more."""
    assert with_ties(3 * 10**12 - 1) == 3 * 10**12 + 1
