"""A job becomes the problem that algorithms solve, and their counts become layouts and steps again."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import InfeasibleSplit, Job, Workload, exact_split, forecast, simulate_pipeline
from megatron_dyn.plan.job import exact_splits
from megatron_dyn.records import Cost, Layout, LayoutError

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def cost(seconds: float, size: int = 0) -> Cost:
    return Cost(
        forward_seconds=seconds / 4,
        backward_seconds=seconds * 3 / 4,
        state_bytes=size,
        activation_bytes=size // 10,
        moved_bytes=size // 2,
    )


def job(text: str, num_stages: int, layers: list[float], **changes: object) -> Job:
    workload = Workload(
        layers=tuple(cost(seconds, 100) for seconds in layers),
        embedding=cost(0.5, 50),
        head=cost(2.0, 70),
        mtp=cost(3.0, 90),
        other_seconds=0.25,
        num_microbatches=8,
    )
    return replace(Job(workload=workload, template=Layout.parse(text, num_stages)), **changes)


def test_ends_are_on_the_first_and_the_last_open_chunk() -> None:
    problem = job("Et*2|t*2|t*2L", 3, [1.0] * 6).problem
    assert (problem.num_chunks, problem.first_seconds, problem.last_seconds) == (3, 0.5, 2.0)
    assert (problem.stage_seconds, problem.current, problem.pinned_last) == ((0.25, 0.25, 0.25), (2, 2, 2), 0)
    assert problem.moved_bytes == (50,) * 6


def test_a_running_job_keeps_its_last_layer_with_mtp() -> None:
    problem = job("Et*2|t*2|t*2mL", 3, [1.0] * 6).problem
    assert (problem.num_chunks, problem.last_seconds, problem.pinned_last) == (3, 5.0, 1)
    # Alone on its chunk behind the last layer, MTP and the loss are load of their ranks.
    alone = job("Et*3|t*3|m|L", 2, [1.0] * 6).problem
    assert (alone.num_chunks, alone.last_seconds, alone.pinned_last) == (2, 0.0, 1)
    assert alone.stage_seconds == (0.5 + 3.0, 0.5 + 2.0)


def test_without_a_present_only_mtp_on_an_open_chunk_holds_a_layer() -> None:
    planned = job("Et*3|t*3m|L", 3, [1.0] * 6, has_current=False).problem
    assert (planned.num_chunks, planned.pinned_last, planned.current) == (2, 1, None)
    free = job("Et*6|t*0m|L".replace("t*0", ""), 3, [1.0] * 6, has_current=False, min_layers=0).problem
    assert (free.num_chunks, free.pinned_last) == (2, 1)


def test_memory_counts_micro_batches_in_flight_and_ends() -> None:
    budget = job("Et*2|t*2|t*2L", 3, [1.0] * 6, cap_bytes=1000).problem.memory
    assert budget is not None
    assert (budget.in_flight, budget.first_bytes, budget.last_bytes) == ((3, 2, 1), 50 + 3 * 5, 70 + 7)
    virtual = job("Et*3|t*3|m|L", 2, [1.0] * 6, cap_bytes=1000).problem.memory
    assert virtual is not None and virtual.rank_bytes is not None
    # State of MTP on rank 0 and of the head on rank 1, and activations of 9 or 7 for each micro-batch in flight.
    assert (virtual.rank_bytes[0] - 90) % 9 == (virtual.rank_bytes[1] - 70) % 7 == 0
    assert min(virtual.rank_bytes) > 70
    assert job("Et*2|t*2|t*2L", 3, [1.0] * 6).peak_bytes((2, 2, 2)) == (250 + 3 * 25, 200 + 2 * 20, 270 + 27)


@pytest.mark.parametrize(("text", "num_stages"), [("Et*2|t*3|tL", 3), ("Et|tt|t|ttL", 2), ("Et*3|t*2|tmL|", 4)])
def test_steps_of_splits_are_those_of_the_simulator(text: str, num_stages: int) -> None:
    here = job(text, num_stages, [1.0, 3.0, 2.0, 0.5, 1.5, 4.0])
    counts = here.template.counts[: here.num_open]
    run = simulate_pipeline(here.workload.chunk_times(here.template), 8)
    assert here.step_seconds_of([counts, counts]) == pytest.approx([run.pipeline_seconds] * 2, rel=1e-12)


def compositions(num_layers: int, num_chunks: int) -> list[tuple[int, ...]]:
    cuts = combinations(range(1, num_layers), num_chunks - 1)
    return [tuple(end - start for start, end in pairwise((0, *cut, num_layers))) for cut in cuts]


@settings(PATIENT, max_examples=60)
@given(
    layers=st.lists(st.floats(0.01, 10.0), min_size=6, max_size=9),
    shape=st.sampled_from([(2, 1), (3, 1), (4, 1), (2, 2)]),
    rounds=st.integers(1, 3),
    slow=st.sampled_from([None, 0.5, 2.0]),
)
def test_the_exact_split_of_a_small_job_has_the_shortest_step_of_all(
    layers: list[float], shape: tuple[int, int], rounds: int, slow: float | None
) -> None:
    """Brute force over all splits, on ranks of one speed and of two, with few micro-batches and more."""
    num_stages, num_virtual = shape
    num_chunks = num_stages * num_virtual
    template = Layout.contiguous([*([1] * (num_chunks - 1)), len(layers) - num_chunks + 1], num_stages=num_stages)
    here = job(template.text, num_stages, layers, has_current=False)
    speeds = None if slow is None else (slow, *([1.0] * (num_stages - 1)))
    here = replace(here, workload=replace(here.workload, num_microbatches=rounds * num_stages, speeds=speeds))
    splits = compositions(len(layers), num_chunks)
    plain, refined = exact_splits(here)
    slowest = {counts: max(forecast(here, here.layout_of(counts)).stage_seconds) for counts in splits}
    assert slowest[plain.counts] == pytest.approx(min(slowest.values()), rel=1e-9)
    assert here.step_seconds_of([refined.counts])[0] <= min(here.step_seconds_of(splits)) * (1 + 1e-8)
    assert exact_split(here) == refined


def test_templates_that_do_not_fit_are_refused() -> None:
    with pytest.raises(LayoutError, match="places 6 layers, the model has 5"):
        job("Et*2|t*2|t*2L", 3, [1.0] * 5)
    with pytest.raises(ValueError, match="expected the embedding on stage 0, got ''"):
        job("|Et*3|t*3L", 3, [1.0] * 6)


@settings(PATIENT, max_examples=30)
@given(layers=st.lists(st.integers(1, 9), min_size=6, max_size=10), cap=st.integers(150, 400), num_virtual=st.integers(1, 2))
def test_a_cap_holds_for_what_a_simulated_step_needs(layers: list[int], cap: int, num_virtual: int) -> None:
    """With virtual stages the chunks of a rank hold their most at different times, and differ in size."""
    num_chunks = 3 * num_virtual
    template = Layout.contiguous([*([1] * (num_chunks - 1)), len(layers) - num_chunks + 1], num_stages=3)
    costs = tuple(Cost(forward_seconds=1.0, state_bytes=3 * size, activation_bytes=size) for size in layers)
    here = Job(workload=Workload(layers=costs, num_microbatches=6), template=template, has_current=False, cap_bytes=cap)
    try:
        counts = exact_split(here).counts
    except InfeasibleSplit:
        return
    assert max(forecast(here, here.layout_of(counts)).stage_bytes) <= max(here.peak_bytes(counts)) <= cap


def test_a_stage_without_decoder_layers_is_held_against_the_cap_too() -> None:
    crowded = job("Et*3|t*3m|L", 3, [1.0] * 6, cap_bytes=700)
    exact_split(crowded)
    heavy = replace(crowded, workload=replace(crowded.workload, head=cost(2.0, 710)))
    with pytest.raises(InfeasibleSplit, match="got 781 on stage 2 before it holds any layer"):
        exact_split(heavy)


def test_the_optimizer_of_the_slowest_stage_is_part_of_the_step() -> None:
    """Two layers with a long optimizer step are better apart."""
    costs = [Cost(forward_seconds=1.0, backward_seconds=2.0, optimizer_seconds=50.0 * (layer in (2, 3))) for layer in range(6)]
    here = Job(workload=Workload(layers=tuple(costs), num_microbatches=8), template=Layout.parse("Ett|tt|ttL", 3))
    assert here.step_seconds_of([(2, 2, 2)]) == [forecast(here, here.template).step_seconds]
    stages = here.layout_of(exact_split(here).counts).stage_of()
    assert stages[2] != stages[3]


def test_steps_count_transfers_as_the_simulator_does() -> None:
    slow = job("Et*2|t*2|t*2L", 3, [1.0] * 6)
    slow = replace(slow, workload=replace(slow.workload, p2p_seconds=0.3))
    expected = simulate_pipeline(slow.workload.chunk_times(slow.template), 8).pipeline_seconds
    assert slow.step_seconds_of([(2, 2, 2)]) == [expected]
