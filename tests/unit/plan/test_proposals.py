"""Proposals of every algorithm with the step they are predicted to give."""

from dataclasses import replace

import pytest

from megatron_dyn.plan import ALGORITHMS, InfeasibleSplit, Job, Proposal, Refused, Workload, compare, forecast, propose
from megatron_dyn.records import Cost, Layout

LAYER = Cost(forward_seconds=1.0, backward_seconds=2.0, optimizer_seconds=0.5, state_bytes=10, activation_bytes=1)
JOB = Job(
    workload=Workload(layers=(LAYER,) * 9, head=Cost(forward_seconds=1.0, backward_seconds=2.0), num_microbatches=8),
    template=Layout.contiguous([3, 3, 3]),
)


def test_a_forecast_has_the_step_its_stages_and_their_bytes() -> None:
    told = forecast(JOB, Layout.contiguous([4, 3, 2]))
    assert told.stage_seconds == (12.0, 9.0, 9.0)
    assert told.busy_seconds == (96.0, 72.0, 72.0)
    # 3, 2 and 1 micro-batches in flight.
    assert told.stage_bytes == (40 + 12, 30 + 6, 20 + 2)
    assert told.run is not None
    assert told.step_seconds == told.run.pipeline_seconds + 2.0
    assert 0.0 < told.bubble_fraction < 0.5


def test_a_step_too_long_to_simulate_one_by_one_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = forecast(JOB, JOB.template)
    monkeypatch.setattr("megatron_dyn.plan.proposals.MAX_OPERATIONS", 10)
    quick = forecast(JOB, JOB.template)
    assert quick.run is None
    assert replace(slow, run=None) == quick


def test_every_algorithm_answers_or_says_why_not() -> None:
    asked: list[str] = []
    answers = compare(JOB, on_progress=asked.append)
    assert asked == [answer.algorithm for answer in answers] == list(ALGORITHMS)
    by_name = {answer.algorithm: answer for answer in answers}
    exact, uniform = by_name["exact"], by_name["megatron-uniform"]
    assert isinstance(exact, Proposal) and isinstance(uniform, Proposal)
    assert (exact.gap, uniform.layout.counts) == (0.0, (3, 3, 3))
    assert exact.forecast.step_seconds <= uniform.forecast.step_seconds
    assert all(answer.reason for answer in answers if isinstance(answer, Refused))
    eight = replace(JOB, workload=replace(JOB.workload, layers=(LAYER,) * 8), template=Layout.contiguous([3, 3, 2]))
    refused = {answer.algorithm: answer for answer in compare(eight)}["megatron-uniform"]
    assert isinstance(refused, Refused)
    assert refused.reason == "megatron-uniform: expected layers that divide by 3 chunks, got 8"


def test_no_split_is_an_error_of_the_one_and_a_line_of_the_comparison() -> None:
    crowded = replace(JOB, cap_bytes=20)
    with pytest.raises(InfeasibleSplit, match="expected at most 20 bytes"):
        propose(crowded)
    assert isinstance(compare(crowded)[0], Refused)
