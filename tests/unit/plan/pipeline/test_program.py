"""The programs of the ranks: every message has two sides, and what is refused. Their times are in test_pipeline."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan import Op, Phase
from megatron_dyn.plan.pipeline.program import Do, number_of, programs
from megatron_dyn.plan.pipeline.schedule import Schedule


@st.composite
def shapes(draw):
    """(schedule, whether transfers overlap)."""
    num_stages, num_virtual = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    forward_only = draw(st.booleans())
    if num_stages == 1 or num_virtual == 1:
        num_microbatches = draw(st.integers(1, 12))
        return Schedule(num_stages=num_stages, num_microbatches=num_microbatches, forward_only=forward_only), False
    schedule = Schedule(
        num_stages=num_stages,
        num_microbatches=num_stages * draw(st.integers(1, 4)),
        num_virtual=num_virtual,
        forward_only=forward_only,
    )
    return schedule, num_stages == 2 or draw(st.booleans())


@settings(deadline=None)
@given(shapes())
def test_each_message_is_sent_and_received_once_and_waited_for_by_both(shape):
    schedule, overlap = shape
    posts, waits = Counter(), Counter()
    for program in programs(schedule, overlap):
        own = [message for do, message in program if do is Do.POST]
        assert len(own) == len(set(own))
        posts.update(own)
        waited = {message for do, message in program if do is Do.WAIT}
        assert waited == set(own)
        waits.update(waited)
    phases = [Phase.FORWARD] if schedule.forward_only else list(Phase)
    ends = {Phase.FORWARD: 0, Phase.BACKWARD: schedule.num_chunks - 1}
    expected = {
        number_of(schedule, Op(phase=phase, chunk=chunk, microbatch=microbatch))
        for phase in phases
        for chunk in range(schedule.num_chunks)
        for microbatch in range(schedule.num_microbatches)
        if chunk != ends[phase]
    }
    assert posts == waits == dict.fromkeys(expected, 2)


def test_a_plain_program():
    """Rank 0 of 2, one micro-batch ahead: its sends are waited for before it goes on. Numbers: forwards, then backwards."""
    schedule = Schedule(num_stages=2, num_microbatches=2)
    kinds = {Do.COMPUTE: "run", Do.POST: "post", Do.WAIT: "wait"}
    words = " ".join(f"{kinds[do]} {number}" for do, number in programs(schedule, overlap_p2p=False)[0])
    # 0 1: forwards of chunk 0, 2 3: inputs of chunk 1, 4 5: gradients for, and backwards of, chunk 0.
    assert words == "run 0 post 2 wait 2 run 1 post 3 post 4 wait 3 wait 4 run 4 post 5 wait 5 run 5"


@pytest.mark.parametrize(
    ("num_stages", "num_virtual", "overlap", "message"),
    [(2, 1, True, "expected virtual stages"), (2, 2, False, "at least 3 stages .* without overlap, got 2")],
)
def test_overlap_that_megatron_refuses(num_stages, num_virtual, overlap, message):
    with pytest.raises(ValueError, match=message):
        programs(Schedule(num_stages=num_stages, num_microbatches=4, num_virtual=num_virtual), overlap)
