"""The simulator of a step against closed forms, its quick form, and the rules that any run of a pipeline obeys.

That the real schedules take this time is shown by tests/distributed/test_simulator.py.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import ChunkTimes, Phase, in_flight_by_chunk, peak_activation_bytes, simulate, simulate_pipeline
from megatron_dyn.plan.pipeline.simulator import pipeline_seconds_of

PATIENT = settings(deadline=None)
SECONDS = st.floats(0.0, 10.0)


def equal_times(num_stages, num_virtual=1, forward=1.0, backward=2.0, p2p=0.0):
    """Equal stages whose work is cut into `num_virtual` equal chunks."""
    num_chunks = num_stages * num_virtual
    return ChunkTimes(
        num_stages=num_stages,
        forward_seconds=(forward / num_virtual,) * num_chunks,
        backward_seconds=(backward / num_virtual,) * num_chunks,
        p2p_seconds=(p2p,) * (num_chunks - 1),
        optimizer_seconds=(0.0,) * num_stages,
    )


def tuples(num, seconds=SECONDS):
    return st.lists(seconds, min_size=num, max_size=num).map(tuple)


@st.composite
def jobs(draw, max_virtual=3, p2p=SECONDS):
    """(times, micro-batches, options) of any kind that Megatron runs."""
    num_stages, num_virtual = draw(st.integers(1, 4)), draw(st.integers(1, max_virtual))
    options = {"forward_only": draw(st.booleans())}
    if num_stages == 1 or num_virtual == 1:
        num_virtual, num_microbatches = 1, draw(st.integers(1, 8))
    else:
        group = draw(st.integers(num_stages, num_stages + 2))
        num_microbatches = group * draw(st.integers(1, 2)) + draw(st.sampled_from([0, *range(num_stages, group)]))
        options |= {"group_size": group, "overlap_p2p": draw(st.sampled_from([None, True] + [False] * (num_stages > 2)))}
    num_chunks = num_stages * num_virtual
    times = ChunkTimes(
        num_stages=num_stages,
        forward_seconds=draw(tuples(num_chunks)),
        backward_seconds=draw(tuples(num_chunks)),
        p2p_seconds=draw(tuples(num_chunks - 1, p2p)),
        optimizer_seconds=draw(tuples(num_stages)),
    )
    return times, num_microbatches, options


@PATIENT
@given(jobs())
def test_ranks_do_their_work_one_operation_at_a_time(job):
    """Nothing overlaps on a rank, nothing is left out, and busy and bubble add up."""
    times, num_microbatches, options = job
    run = simulate_pipeline(times, num_microbatches, **options)
    seconds = {Phase.FORWARD: times.forward_seconds, Phase.BACKWARD: times.backward_seconds}
    for pp_rank, spans in enumerate(run.spans):
        assert {span.pp_rank for span in spans} == {pp_rank} == {span.chunk % times.num_stages for span in spans}
        assert all(before.end_seconds <= after.start_seconds for before, after in itertools.pairwise(spans))
        for span in spans:
            assert span.end_seconds == span.start_seconds + seconds[span.phase][span.chunk]
        work = sum(seconds[span.phase][span.chunk] for span in spans)
        assert run.busy_seconds[pp_rank] == pytest.approx(work, rel=1e-12)
    assert run.pipeline_seconds == max(span.end_seconds for spans in run.spans for span in spans)
    whole = len(run.spans) * run.pipeline_seconds
    share = (whole - sum(run.busy_seconds)) / whole if whole else 0.0
    assert run.bubble_fraction == pytest.approx(share, abs=1e-9)


@PATIENT
@given(jobs())
def test_nothing_starts_before_its_input_has_arrived(job):
    """From the chunk before, or behind, a transfer later; a backward on the last chunk after its own forward."""
    times, num_microbatches, options = job
    run = simulate_pipeline(times, num_microbatches, **options)
    ends = {(span.phase, span.chunk, span.microbatch): span.end_seconds for spans in run.spans for span in spans}
    last = len(times.forward_seconds) - 1
    for span in itertools.chain.from_iterable(run.spans):
        if span.phase is Phase.FORWARD and span.chunk > 0:
            arrival = ends[Phase.FORWARD, span.chunk - 1, span.microbatch] + times.p2p_seconds[span.chunk - 1]
        elif span.phase is Phase.BACKWARD and span.chunk < last:
            arrival = ends[Phase.BACKWARD, span.chunk + 1, span.microbatch] + times.p2p_seconds[span.chunk]
        else:
            arrival = ends[Phase.FORWARD, span.chunk, span.microbatch] if span.phase is Phase.BACKWARD else 0.0
        assert span.start_seconds >= arrival


@PATIENT
@given(jobs())
def test_a_step_is_no_shorter_than_its_bounds(job):
    """A rank's own work, and one micro-batch through all chunks; the slowest optimizer comes on top."""
    times, num_microbatches, options = job
    run = simulate_pipeline(times, num_microbatches, **options)
    through = sum(times.forward_seconds) + sum(times.p2p_seconds)
    if not options["forward_only"]:
        through += sum(times.backward_seconds) + sum(times.p2p_seconds)
        assert run.step_seconds == run.pipeline_seconds + max(times.optimizer_seconds)
    else:
        assert run.step_seconds == run.pipeline_seconds
    assert run.pipeline_seconds >= max(through, *run.busy_seconds) * (1 - 1e-12)


@PATIENT
@given(jobs(max_virtual=1, p2p=st.just(0.0)))
def test_without_transfer_times_the_quick_form_is_exact(job):
    times, num_microbatches, options = job
    run = simulate_pipeline(times, num_microbatches)
    assert run.pipeline_seconds == simulate(times.forward_seconds, times.backward_seconds, num_microbatches).step_seconds


@PATIENT
@given(jobs(max_virtual=1))
def test_transfers_that_hold_up_never_help(job):
    times, num_microbatches, _ = job
    run = simulate_pipeline(times, num_microbatches)
    quick = simulate(times.forward_seconds, times.backward_seconds, num_microbatches, times.p2p_seconds)
    assert run.pipeline_seconds >= quick.step_seconds * (1 - 1e-12)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (4, 9), (8, 3)])
def test_equal_stages(num_stages, num_microbatches):
    """(m + p - 1) (f + b); forward only (m + p - 1) f."""
    times, slots = equal_times(num_stages), num_microbatches + num_stages - 1
    run = simulate_pipeline(times, num_microbatches)
    assert run.pipeline_seconds == 3.0 * slots
    assert run.bubble_fraction == pytest.approx((num_stages - 1) / slots)
    assert simulate_pipeline(times, num_microbatches, forward_only=True).pipeline_seconds == 1.0 * slots


@pytest.mark.parametrize(("num_stages", "num_virtual", "num_microbatches"), [(2, 2, 4), (4, 2, 4), (4, 4, 8), (3, 5, 9)])
def test_virtual_stages_divide_the_bubble(num_stages, num_virtual, num_microbatches):
    """(m + (p - 1) / v) (f + b): Narayanan et al., SC'21, section 2.2.2."""
    run = simulate_pipeline(equal_times(num_stages, num_virtual), num_microbatches, overlap_p2p=num_stages == 2 or None)
    assert run.pipeline_seconds == pytest.approx(3.0 * (num_microbatches + (num_stages - 1) / num_virtual))


def test_transfers_hold_up_their_sender():
    """Two stages, by hand: both sides of each transfer lose its time."""
    run = simulate_pipeline(equal_times(2, p2p=0.5), 2)
    rank_0 = [(span.start_seconds, span.end_seconds) for span in run.spans[0]]
    rank_1 = [(span.start_seconds, span.end_seconds) for span in run.spans[1]]
    # Rank 0 sends from 1.0 to 1.5; the second activation waits from 2.5 for rank 1, which fetches it at 4.5.
    assert rank_0 == [(0.0, 1.0), (1.5, 2.5), (5.0, 7.0), (8.5, 10.5)]
    assert rank_1 == [(1.5, 2.5), (2.5, 4.5), (5.0, 6.0), (6.0, 8.0)]
    # With senders that go on, rank 1 has its second activation at 3.5 and does not fetch it between its operations.
    assert simulate([1.0, 1.0], [2.0, 2.0], 2, 0.5).step_seconds == 10.0


def test_overlap_hides_transfers():
    """A rank computes while its transfers run, but for the warm-up and the end."""
    times = equal_times(4, 2, p2p=0.1)
    overlapped, batched = (simulate_pipeline(times, 16, overlap_p2p=overlap).step_seconds for overlap in (True, False))
    assert simulate_pipeline(times, 16).step_seconds == overlapped < batched


@PATIENT
@given(jobs())
def test_in_flight_follows_from_the_order(job):
    times, num_microbatches, options = job
    run = simulate_pipeline(times, num_microbatches, **options)
    num_stages, num_chunks = times.num_stages, len(times.forward_seconds)
    by_chunk = in_flight_by_chunk(num_microbatches, num_stages, num_chunks // num_stages, options.get("group_size"))
    bounds = [sum(by_chunk[pp_rank::num_stages]) for pp_rank in range(num_stages)]
    if num_chunks == num_stages and not options["forward_only"]:
        assert list(run.in_flight) == bounds
    assert all(count <= bound for count, bound in zip(run.in_flight, bounds, strict=True))
    assert not (options["forward_only"] and any(run.in_flight))
    sizes = [3 * chunk % 7 for chunk in range(num_chunks)]
    held = [
        sum(size * count for size, count in zip(sizes[rank::num_stages], by_chunk[rank::num_stages], strict=True))
        for rank in range(num_stages)
    ]
    assert all(peak <= bound for peak, bound in zip(peak_activation_bytes(run, sizes), held, strict=True))
    assert peak_activation_bytes(run, [7] * num_chunks) == tuple(7 * count for count in run.in_flight)


@PATIENT
@given(jobs(), st.integers(1, 3))
def test_many_layouts_at_once_take_what_each_takes(job, batch):
    times, num_microbatches, options = job
    factors = [1.0, 0.5, 3.0][:batch]
    forward, backward = (np.outer(factors, seconds) for seconds in (times.forward_seconds, times.backward_seconds))
    options = {"group_size": options.get("group_size")}
    found = pipeline_seconds_of(forward, backward, times.p2p_seconds, num_microbatches, num_stages=times.num_stages, **options)
    for factor, seconds in zip(factors, found, strict=True):
        scaled = replace(
            times,
            forward_seconds=tuple(factor * value for value in times.forward_seconds),
            backward_seconds=tuple(factor * value for value in times.backward_seconds),
        )
        assert seconds == simulate_pipeline(scaled, num_microbatches, **options).pipeline_seconds


def test_peak_bytes_where_chunks_differ():
    """Rank 0 of 2 with 2 chunks holds at most 5: three of its first and two of its second, later four and one."""
    run = simulate_pipeline(equal_times(2, 2), 4)
    assert run.in_flight == (5, 3)
    assert in_flight_by_chunk(4, 2, 2) == (4, 3, 2, 1)
    assert peak_activation_bytes(run, [100, 1, 1, 1]) == (401, 3)
    with pytest.raises(ValueError, match="expected 4 chunks, got 2"):
        peak_activation_bytes(run, [1, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_seconds": (1.0,)}, "got 1 forward, 2 backward"),
        ({"p2p_seconds": ()}, "2 backward, 0 p2p"),
        ({"optimizer_seconds": (0.0,)}, "1 optimizer"),
        ({"num_stages": 3}, "on each of 3 stages"),
        ({"backward_seconds": (1.0, -1.0)}, r"backward_seconds\[1\]: expected a time of at least 0, got -1.0"),
        ({"p2p_seconds": (float("inf"),)}, r"p2p_seconds\[0\].*got inf"),
    ],
)
def test_malformed_times_are_refused(changes, message):
    fields = {"num_stages": 2, "forward_seconds": (1.0,) * 2, "backward_seconds": (1.0,) * 2}
    fields |= {"p2p_seconds": (0.0,), "optimizer_seconds": (0.0,) * 2}
    with pytest.raises(ValueError, match=message):
        simulate_pipeline(ChunkTimes(**{**fields, **changes}), 4)
