"""The problem: what it refuses, and what a split of it is said to take and to move."""

import pytest

from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.problem import Split, SplitProblem

BUDGET = MemoryBudget(state_bytes=(1,), activation_bytes=(1,), in_flight=(1,), cap_bytes=9)
RANKED = MemoryBudget(state_bytes=(1, 1), activation_bytes=(1, 1), in_flight=(1, 1), rank_bytes=(1,), cap_bytes=9)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "got 0 stages"),
        ({"min_layers": 2}, "min_layers 2"),
        ({"num_chunks": 0}, "num_chunks: expected at least 1, got 0"),
        ({"layer_seconds": (1.0, -1.0)}, "layer 1: expected a time of at least 0, got -1.0"),
        ({"layer_seconds": (float("nan"), 1.0)}, "layer 0: .* got nan"),
        ({"first_seconds": float("inf")}, "first_seconds: .* got inf"),
        ({"last_seconds": -2.0}, "last_seconds: .* got -2.0"),
        ({"stage_seconds": (1.0, -3.0)}, r"stage_seconds\[1\]: expected a time of at least 0, got -3.0"),
        ({"stage_seconds": (1.0,)}, "stage_seconds: expected one for each of 2 stages, got 1"),
        ({"speeds": (1.0, 0.0)}, r"speeds\[1\]: expected a finite speed above 0, got 0.0"),
        ({"speeds": (float("inf"), 1.0)}, r"speeds\[0\]: expected a finite speed above 0, got inf"),
        ({"speeds": (1.0, 1.0, 1.0)}, "speeds: expected one for each of 2 stages, got 3"),
        ({"uncut": (1, 0)}, r"uncut\[1\]: expected a layer with one before it, 1..1, got 0"),
        ({"uncut": (2,)}, r"uncut\[0\]: .* got 2"),
        ({"pinned_first": -1}, "pinned_first and pinned_last: .* got -1 and 0"),
        ({"pinned_first": 2, "pinned_last": 1}, "at most 2 layers together, got 2 and 1"),
        ({"current": (2,)}, r"current \[2\] does not place 2 layers on 2 stages"),
        ({"current": (2, 1)}, r"current \[2, 1\] does not place 2 layers"),
        ({"current": (3, -1)}, r"current \[3, -1\] does not place"),
        ({"current": (1, 1), "num_chunks": 4}, r"current \[1, 1\] does not place 2 layers on 4 chunks"),
        ({"moved_bytes": (1,)}, "moved_bytes: expected 2 sizes .* got 1"),
        ({"moved_bytes": (1, -1)}, "with minimum -1"),
        ({"moved_bytes": (2**61, 1)}, "below 2..61"),
        ({"layer_parameters": (1, 2, 3)}, "layer_parameters: expected 2 sizes .* got 3"),
        ({"memory": BUDGET}, "memory: expected 2 layers and 2 stages, got 1 and 1"),
        ({"memory": BUDGET, "num_chunks": 4}, "memory: expected 2 layers and 4 chunks, got 1 and 1"),
        ({"memory": RANKED}, "memory.rank_bytes: expected one for each of 2 stages, got 1"),
    ],
)
def test_a_malformed_problem_is_refused(arguments: dict[str, object], message: str) -> None:
    """One line with the field, what was expected and what was found."""
    with pytest.raises(ValueError, match=message) as caught:
        SplitProblem(**({"layer_seconds": (1.0, 1.0), "num_stages": 2} | arguments))  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


VIRTUAL = SplitProblem(
    layer_seconds=(1.0, 2.0, 4.0, 8.0, 16.0),
    num_stages=2,
    num_chunks=3,
    first_seconds=0.5,
    last_seconds=0.25,
    stage_seconds=(0.0, 3.0),
    speeds=(2.0, 1.0),
    current=(1, 1, 3),
    moved_bytes=(10, 20, 30, 40, 50),
)


def test_a_stage_is_as_slow_as_all_its_chunks_and_ends_by_its_speed() -> None:
    """Chunks 0 and 2 are on stage 0 with both ends, chunk 1 is on stage 1; a layer moves when its stage changes."""
    split = VIRTUAL.split((2, 2, 1))
    assert split == Split(counts=(2, 2, 1), bottleneck_seconds=15.0, moved_layers=(1, 2, 3), moved_bytes=90, bound_seconds=15.0)
    assert VIRTUAL.bottleneck_seconds((1, 1, 3)) == (0.5 + 1 + 4 + 8 + 16 + 0.25) / 2


def test_a_bound_is_never_above_the_split() -> None:
    """A bound from integers may be a rounding above."""
    assert VIRTUAL.split((2, 2, 1), bound_seconds=14.0).bound_seconds == 14.0
    assert VIRTUAL.split((2, 2, 1), bound_seconds=15.0001).bound_seconds == 15.0


def test_without_a_current_split_nothing_moves() -> None:
    """Each layer weighs 1 unless told otherwise."""
    problem = SplitProblem(layer_seconds=(1.0, 1.0), num_stages=2)
    assert (problem.num_runs, problem.weights, problem.split((1, 1)).moved_layers) == (2, (1, 1), ())


@pytest.mark.parametrize("counts", [(1, 1), (1, 1, 0), (3, -1)])
def test_counts_that_do_not_place_every_layer_make_no_split(counts: tuple[int, ...]) -> None:
    """Without the check a layer would be left out and the split look faster than any real one."""
    with pytest.raises(ValueError, match="do not place 3 layers on 2 stages"):
        SplitProblem(layer_seconds=(1.0,) * 3, num_stages=2).split(counts)


def test_the_rounds_of_an_iterative_algorithm_are_kept() -> None:
    """None for the others."""
    assert VIRTUAL.split((2, 2, 1), rounds=4).rounds == 4
    assert VIRTUAL.split((2, 2, 1)).rounds is None
