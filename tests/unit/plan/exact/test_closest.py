"""The tie-break keeps the most weight, then the boundaries that are nearest, by going through all splits."""

from itertools import accumulate, combinations_with_replacement, pairwise
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.closest import closest_counts
from megatron_dyn.plan.exact.sweep import Sweep
from megatron_dyn.plan.exact.tables import Rate
from tests.unit.plan.brute_force import PATIENT


@settings(PATIENT, max_examples=60)
@given(st.randoms(use_true_random=False), st.integers(0, 1), st.integers(20, 60))
def test_it_keeps_the_most_then_the_nearest(random: Random, least: int, bound: int) -> None:
    """Seven items on three stages; what a stage holds now need not be one run, as with virtual stages."""
    loads, weights = ([random.randint(0, 9) for _ in range(7)] for _ in range(2))
    homes = [random.randrange(3) for _ in range(7)]
    places = np.array([0, *accumulate(random.randint(1, 3) for _ in range(7))])
    old = [0, *sorted(random.randint(0, int(places[-1])) for _ in range(2)), int(places[-1])]
    rates = [Rate(1, 1), Rate(1, 2), Rate(1, 1)]
    sweep = Sweep(prefix=[0, *accumulate(loads)], fixed=[1, 2, 3], rates=rates, least=[least] * 3, memory=None)

    def held(stage: int) -> np.ndarray:
        kept = (weight if home == stage else 0 for weight, home in zip(weights, homes, strict=True))
        return np.array([0, *accumulate(kept)])

    def rank(ends: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]]:
        moved = sum(weights[i] for s, (a, b) in enumerate(pairwise(ends)) for i in range(a, b) if homes[i] != s)
        return moved, [(abs(int(places[end]) - there), end) for end, there in zip(ends, old, strict=True)]

    allowed = []
    for inner in combinations_with_replacement(range(8), 2):
        ends = (0, *inner, 7)
        counts = tuple(end - start for start, end in pairwise(ends))
        if min(counts) >= least and sweep.peak(counts) <= bound:
            allowed.append(ends)
    if allowed:
        expected = tuple(end - start for start, end in pairwise(min(allowed, key=rank)))
        assert closest_counts(sweep, bound=bound, held=held, places=places, old=old) == expected
