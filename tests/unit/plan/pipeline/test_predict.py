"""The simulator against closed forms, against an event loop that knows only the rules, and against common sense."""

import random
import statistics

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import (
    ChunkTimes,
    Timeline,
    bubble_fraction,
    simulate,
    simulate_pipeline,
    step_seconds_of,
)

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""

TIMES = st.floats(0.0, 100.0)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[float], list[float], int, list[float]]:
    """(forward, backward, micro-batches, p2p) of up to six stages, more micro-batches than stages and fewer."""
    num_stages = draw(st.integers(1, 6))
    table = st.lists(TIMES, min_size=num_stages, max_size=num_stages)
    p2p = draw(st.lists(TIMES, min_size=num_stages - 1, max_size=num_stages - 1))
    return draw(table), draw(table), draw(st.integers(1, 12)), p2p


def event_loop(forward: list[float], backward: list[float], num_microbatches: int, p2p: list[float]) -> float:
    """Run each stage's list of operations, one whenever its input is there; returns when the last is done."""
    num_stages = len(forward)
    todo: list[list[tuple[str, int]]] = []
    for stage in range(num_stages):
        warmup = min(num_stages - stage - 1, num_microbatches)
        order = [("F", i) for i in range(warmup)]
        for i in range(num_microbatches - warmup):
            order += [("F", warmup + i), ("B", i)]
        todo.append(order + [("B", i) for i in range(num_microbatches - warmup, num_microbatches)])
    done: dict[tuple[str, int, int], float] = {}
    clock = [0.0] * num_stages
    while any(todo):
        progress = False
        for stage in range(num_stages):
            if not todo[stage]:
                continue
            kind, i = todo[stage][0]
            neighbour = stage - 1 if kind == "F" else stage + 1
            arrival = 0.0
            if 0 <= neighbour < num_stages:
                if (kind, i, neighbour) not in done:
                    continue
                arrival = done[kind, i, neighbour] + p2p[min(stage, neighbour)]
            todo[stage].pop(0)
            clock[stage] = max(clock[stage], arrival) + (forward if kind == "F" else backward)[stage]
            done[kind, i, stage] = clock[stage]
            progress = True
        assert progress, "the schedule is stuck"
    return max(clock)


@settings(PATIENT, max_examples=400)
@given(pipelines())
def test_it_agrees_with_an_event_loop(pipeline: tuple[list[float], list[float], int, list[float]]) -> None:
    """Bit for bit: both add and compare the same numbers."""
    assert simulate(*pipeline).step_seconds == event_loop(*pipeline)


@PATIENT
@given(st.integers(1, 8), st.integers(1, 20), st.floats(0.001, 10.0), st.floats(0.001, 10.0))
def test_equal_stages(num_stages: int, num_microbatches: int, forward: float, backward: float) -> None:
    """(m + p - 1) (f + b), and the ideal bubble (p - 1) / (m + p - 1)."""
    timeline = simulate([forward] * num_stages, [backward] * num_stages, num_microbatches)
    slots = num_microbatches + num_stages - 1
    assert timeline.step_seconds == pytest.approx(slots * (forward + backward), rel=1e-12)
    assert timeline.bubble_fraction == pytest.approx((num_stages - 1) / slots, abs=1e-12)


@PATIENT
@given(pipelines())
def test_one_microbatch_runs_through_everything(pipeline: tuple[list[float], list[float], int, list[float]]) -> None:
    """No overlap: all forwards, all backwards, every boundary twice."""
    forward, backward, _, p2p = pipeline
    expected = sum(forward) + sum(backward) + 2 * sum(p2p)
    assert simulate(forward, backward, 1, p2p).step_seconds == pytest.approx(expected, rel=1e-12)


def test_one_slow_stage_sets_the_pace() -> None:
    """Many micro-batches: the slow stage waits for its first input only, and stage 0 alone runs after it."""
    timeline = simulate([1.0, 5.0, 1.0], [2.0, 10.0, 2.0], 100)
    assert timeline.step_seconds == 1.0 + 100 * 15.0 + 2.0
    assert timeline.busy_seconds == (300.0, 1500.0, 300.0)


@PATIENT
@given(pipelines(), st.data())
def test_slower_pieces_never_make_a_faster_step(
    pipeline: tuple[list[float], list[float], int, list[float]], data: st.DataObject
) -> None:
    """Raising one time, or adding a micro-batch, does not lower the step time; no stage is busy for longer."""
    forward, backward, num_microbatches, p2p = pipeline
    before = simulate(*pipeline)
    tables = [list(forward), list(backward), list(p2p)]
    table = data.draw(st.sampled_from([t for t in tables if t]))
    table[data.draw(st.integers(0, len(table) - 1))] += data.draw(TIMES)
    assert simulate(tables[0], tables[1], num_microbatches, tables[2]).step_seconds >= before.step_seconds
    assert simulate(forward, backward, num_microbatches + 1, p2p).step_seconds >= before.step_seconds
    assert max(before.busy_seconds) <= before.step_seconds * (1 + 1e-12)
    assert 0.0 <= before.bubble_fraction <= 1.0


def test_one_time_for_all_boundaries() -> None:
    """A number means the same as a list of it."""
    assert simulate([1.0] * 3, [2.0] * 3, 4, 0.5) == simulate([1.0] * 3, [2.0] * 3, 4, [0.5, 0.5])


def test_nothing_to_do_divides_nothing_by_zero() -> None:
    """Stages without cost, all or some of them."""
    assert simulate([0.0, 0.0], [0.0, 0.0], 3) == Timeline(step_seconds=0.0, busy_seconds=(0.0, 0.0), bubble_fraction=0.0)
    assert simulate([0.0, 1.0], [0.0, 1.0], 3).step_seconds == 6.0
    assert bubble_fraction((), 1.0) == 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], [], 1), "got 0 forward"),
        (([1.0], [1.0, 1.0], 1), "got 1 forward, 2 backward"),
        (([1.0, 1.0], [1.0, 1.0], 1, [1.0, 1.0]), "2 p2p"),
        (([1.0], [1.0], 0), "at least 1 micro-batch, got 0"),
        (([1.0, -1.0], [1.0, 1.0], 1), r"forward_seconds\[1\].*got -1.0"),
        (([1.0], [float("nan")], 1), r"backward_seconds\[0\].*got nan"),
        (([1.0, 1.0], [1.0, 1.0], 1, -0.5), r"p2p_seconds\[0\].*got -0.5"),
    ],
)
def test_malformed_tables_are_refused(arguments: tuple[object, ...], message: str) -> None:
    """The message names the table and the number."""
    with pytest.raises(ValueError, match=message):
        simulate(*arguments)  # type: ignore[arg-type]


@PATIENT
@given(pipelines(), st.integers(0, 30))
def test_many_candidates_at_once(pipeline: tuple[list[float], list[float], int, list[float]], num_candidates: int) -> None:
    """Bit for bit what `simulate` gives each, with few numbers (plain loops) and with many (arrays)."""
    forward, backward, num_microbatches, p2p = pipeline
    scales = 1.0 + np.arange(num_candidates)[:, None] / 7
    found = step_seconds_of(scales * forward, backward / scales, num_microbatches, p2p)
    rows = zip(scales * forward, backward / scales, strict=True)
    assert found.tolist() == [simulate(list(f), list(b), num_microbatches, p2p).step_seconds for f, b in rows]


@pytest.mark.parametrize(("share", "median", "largest"), [(0.01, 0.003, 0.007), (0.05, 0.011, 0.032), (0.1, 0.022, 0.06)])
def test_the_quick_form_is_as_far_off_as_documented(share: float, median: float, largest: float) -> None:
    """What senders that do not wait leave out, by how long a transfer takes beside a forward."""
    draw = random.Random(1)
    missing = []
    for _ in range(50):
        num_stages = draw.choice((2, 4, 8, 16))
        num_microbatches = num_stages * draw.choice((1, 2, 4))
        forward = tuple(draw.uniform(0.5, 1.5) for _ in range(num_stages))
        backward = tuple(2 * seconds * draw.uniform(0.8, 1.2) for seconds in forward)
        times = ChunkTimes(
            num_stages=num_stages,
            forward_seconds=forward,
            backward_seconds=backward,
            p2p_seconds=(share,) * (num_stages - 1),
            optimizer_seconds=(0.0,) * num_stages,
        )
        quick = simulate(forward, backward, num_microbatches, share).step_seconds
        missing.append(1 - quick / simulate_pipeline(times, num_microbatches).step_seconds)
    assert min(missing) >= 0.0
    assert statistics.median(missing) <= median
    assert max(missing) <= largest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1.0], [1.0], 1), r"expected two arrays \[batch, stages\], got \(1,\) and \(1,\)"),
        (([[1.0]], [[1.0, 2.0]], 1), r"got \(1, 1\) and \(1, 2\)"),
        (([[1.0, 1.0]], [[1.0, 1.0]], 1, [1.0, 1.0]), "2 p2p"),
        (([[1.0]], [[1.0]], 0), "at least 1 micro-batch, got 0"),
        (([[1.0], [-1.0]], [[1.0], [1.0]], 1), r"forward_seconds\[1, 0\].*got -1.0"),
        (([[1.0]], [[float("nan")]], 1), r"backward_seconds\[0, 0\].*got nan"),
    ],
)
def test_malformed_batches_are_refused(arguments: tuple[object, ...], message: str) -> None:
    """The message names the array, the candidate and the stage."""
    with pytest.raises(ValueError, match=message):
        step_seconds_of(*map(np.array, arguments[:2]), *arguments[2:])  # type: ignore[arg-type]
