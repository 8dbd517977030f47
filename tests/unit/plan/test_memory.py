"""Bytes of a stage: the sums of a budget, and what it refuses."""

from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import MemoryBudget

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""


def test_a_stage_holds_its_layers_and_its_end() -> None:
    """State once, activations once per micro-batch in flight, the ends on the ends only."""
    budget = MemoryBudget(
        state_bytes=(10, 20, 30),
        activation_bytes=(1, 2, 3),
        in_flight=(3, 2, 1),
        first_bytes=100,
        last_bytes=200,
        cap_bytes=1000,
    )
    assert budget.stage_bytes(0, range(2)) == 100 + 10 + 20 + 3 * (1 + 2)
    assert budget.stage_bytes(1, range(2, 3)) == 30 + 2 * 3
    assert budget.stage_bytes(2, range(0)) == 200


def test_one_stage_holds_both_ends() -> None:
    """Without a pipeline the first stage is the last."""
    budget = MemoryBudget(state_bytes=(1,), activation_bytes=(1,), in_flight=(1,), first_bytes=10, last_bytes=20, cap_bytes=99)
    assert budget.fixed_bytes(0) == 30


@PATIENT
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8))
def test_needed_bytes_are_those_of_the_layers_before(layers: list[tuple[int, int]]) -> None:
    """The difference of two boundaries is what the layers between them add, chunk by chunk."""
    budget = MemoryBudget(
        state_bytes=tuple(state for state, _ in layers),
        activation_bytes=tuple(activation for _, activation in layers),
        in_flight=(3, 2, 1),
        cap_bytes=9,
    )
    needed = budget.needed_bytes()
    assert needed.shape == (3, len(layers) + 1)
    for chunk, row in enumerate(needed.tolist()):
        for start, end in combinations(range(len(layers) + 1), 2):
            assert row[end] - row[start] == budget.stage_bytes(chunk, range(start, end)) - budget.fixed_bytes(chunk)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation_bytes": (1,)}, "state_bytes has 2 layers, activation_bytes has 1"),
        ({"state_bytes": (1, -1)}, "at least 0, got -1"),
        ({"cap_bytes": -5}, "at least 0, got -5"),
        ({"in_flight": ()}, "got 0 stages"),
        ({"rank_bytes": (3, -2)}, "at least 0, got -2"),
        ({"rank_bytes": (2**61,)}, "sum below"),
        ({"state_bytes": (2**61, 0)}, "sum below"),
    ],
)
def test_a_malformed_budget_is_refused(arguments: dict[str, object], message: str) -> None:
    """The message says which table, expected and actual."""
    good: dict[str, object] = {"state_bytes": (1, 1), "activation_bytes": (1, 1), "in_flight": (1,), "cap_bytes": 9}
    with pytest.raises(ValueError, match=message):
        MemoryBudget(**(good | arguments))  # type: ignore[arg-type]
