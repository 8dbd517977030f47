"""Bytes of a stage under 1F1B: micro-batches in flight, the budget's sums, and what a Snapshot turns into."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import MemoryBudget, in_flight_microbatches, memory_budget
from megatron_dyn.records import Cost, Layout, Snapshot

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""


def schedule(num_stages: int, stage: int, num_microbatches: int) -> list[int]:
    """+1 for a forward, -1 for a backward, in the order in which the stage runs them."""
    warmup = min(num_stages - stage - 1, num_microbatches)
    return [1] * warmup + [1, -1] * (num_microbatches - warmup) + [-1] * warmup


@PATIENT
@given(st.integers(1, 12), st.integers(1, 20))
def test_in_flight_is_the_peak_of_the_schedule(num_stages: int, num_microbatches: int) -> None:
    """Counting forwards without their backward along each stage's schedule gives the same numbers."""
    peaks = []
    for stage in range(num_stages):
        steps = schedule(num_stages, stage, num_microbatches)
        peaks.append(max(sum(steps[:end]) for end in range(1, len(steps) + 1)))
    assert in_flight_microbatches(num_microbatches, num_stages) == tuple(peaks)


@pytest.mark.parametrize(("num_microbatches", "num_stages"), [(0, 2), (2, 0)])
def test_in_flight_refuses_nothing_to_run(num_microbatches: int, num_stages: int) -> None:
    """The message holds both numbers."""
    with pytest.raises(ValueError, match=f"got {num_microbatches} and {num_stages}"):
        in_flight_microbatches(num_microbatches, num_stages)


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
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=8), st.integers(0, 60))
def test_furthest_ends_are_the_longest_runs_that_fit(layers: list[tuple[int, int]], cap: int) -> None:
    """By trying every run."""
    budget = MemoryBudget(
        state_bytes=tuple(state for state, _ in layers),
        activation_bytes=tuple(activation for _, activation in layers),
        in_flight=(3, 2, 1),
        cap_bytes=cap,
    )
    boundaries = range(len(layers) + 1)
    for stage, row in enumerate(budget.furthest_ends().tolist()):
        for start in boundaries:
            fitting = [end for end in boundaries[start:] if budget.stage_bytes(stage, range(start, end)) <= cap]
            assert row[start] == max(fitting)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"activation_bytes": (1,)}, "state_bytes has 2 layers, activation_bytes has 1"),
        ({"state_bytes": (1, -1)}, "at least 0, got -1"),
        ({"cap_bytes": -5}, "at least 0, got -5"),
        ({"in_flight": ()}, "got 0 stages"),
        ({"state_bytes": (2**61, 0)}, "sum below"),
    ],
)
def test_a_malformed_budget_is_refused(arguments: dict[str, object], message: str) -> None:
    """The message says which table, expected and actual."""
    good: dict[str, object] = {"state_bytes": (1, 1), "activation_bytes": (1, 1), "in_flight": (1,), "cap_bytes": 9}
    with pytest.raises(ValueError, match=message):
        MemoryBudget(**(good | arguments))  # type: ignore[arg-type]


def snapshot(text: str, num_stages: int, num_microbatches: int) -> Snapshot:
    """Layers with state 10, 11, ... and activations 1, 2, ...; embedding 100 + 5, head 200 + 7."""
    layout = Layout.parse(text, num_stages)
    return Snapshot(
        iteration=1,
        layout=layout,
        layers=tuple(Cost(state_bytes=10 + layer, activation_bytes=1 + layer) for layer in range(layout.num_layers)),
        embedding=Cost(state_bytes=100, activation_bytes=5),
        head=Cost(state_bytes=200, activation_bytes=7),
        other_seconds=0.0,
        stages=(),
        step_seconds=1.0,
        num_microbatches=num_microbatches,
    )


def test_the_budget_of_a_snapshot() -> None:
    """Per layer as measured; the embedding with its micro-batches in flight on stage 0, the head on the last stage."""
    budget = memory_budget(snapshot("Ett|tt|ttL", 3, 8), num_stages=3, cap_bytes=77)
    assert budget == MemoryBudget(
        state_bytes=(10, 11, 12, 13, 14, 15),
        activation_bytes=(1, 2, 3, 4, 5, 6),
        in_flight=(3, 2, 1),
        first_bytes=100 + 3 * 5,
        last_bytes=200 + 7,
        cap_bytes=77,
    )


def test_a_head_behind_the_open_stages_does_not_count() -> None:
    """MTP on stage 1 closes stage 2; stage 1 still has two micro-batches in flight, those of a pipeline of three."""
    budget = memory_budget(snapshot("Ett|ttm|L", 3, 8), num_stages=2, cap_bytes=77)
    assert (budget.in_flight, budget.last_bytes) == ((3, 2), 0)
