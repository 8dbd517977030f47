"""Rehearsals: rounds when a job would have them, moves that pay, none for what does not last."""

import pytest

from megatron_dyn.cli.rounds import StepSeconds, rehearse
from megatron_dyn.cli.workloads import LAYER, Frame, Trace, generate
from megatron_dyn.config import DecideConfig, DynConfig, MeasureConfig, RebalancePolicy
from megatron_dyn.plan import MoveHistory
from megatron_dyn.records import Cost, Layout, Outcome

EVEN_18 = Layout.contiguous((5, 4, 5, 4))
EVEN = Layout.contiguous((4, 4, 4, 4))


def config_of(rebalance="auto", *, window=6, **decide):
    return DynConfig(
        rebalance=RebalancePolicy.parse(rebalance),
        measure=MeasureConfig(interval_steps=5, window_samples=window, warmup_steps=2),
        decide=DecideConfig(**decide),
    )


def trace_of(kind, *, num_steps=400, num_layers=16):
    return generate(kind, (LAYER,) * num_layers, num_stages=4, num_steps=num_steps, num_microbatches=16)


def run(trace, config=None, layout=EVEN, **more):
    return rehearse(trace, layout, config or config_of(), step_seconds=StepSeconds(trace), **more)


def steps_of(rehearsal, outcome=None):
    return [report.iteration for report in rehearsal.rounds if outcome in (None, report.outcome)]


def test_stationary_skew_is_worth_exactly_one_move():
    rehearsal = run(trace_of("stationary-skew"))
    assert rehearsal.num_moves == 1
    assert rehearsal.policy_seconds < rehearsal.static_seconds
    assert rehearsal.layouts[0] == EVEN
    assert rehearsal.layouts[-1].counts[0] < 4


@pytest.mark.parametrize("kind", ["rotating-hot-spot", "one-step-burst", "mixture-of-depths"])
def test_what_does_not_last_moves_nothing(kind):
    # By default a window has six samples. One in some thirty sees a spot that wanders over four stages on two of them
    # only, with the same gain in each, and would move for it.
    rehearsal = run(trace_of(kind), config_of(window=8))
    assert len(rehearsal.rounds) == 10
    assert rehearsal.num_moves == 0
    assert rehearsal.policy_seconds == rehearsal.static_seconds


def test_rounds_come_when_a_window_is_full():
    # Six samples, one in each five steps; the first two steps are warm-up.
    rounds = steps_of(run(trace_of("mixture-of-depths", num_steps=90)))
    assert [(step - 1) // 30 for step in rounds] == [0, 1, 2]


def test_a_move_is_paid_for_and_starts_the_windows_anew():
    trace = trace_of("stationary-skew")
    rehearsal = run(trace)
    (move,) = (report for report in rehearsal.rounds if report.outcome is Outcome.COMMIT)
    moved_bytes = LAYER.moved_bytes * len(move.moves)
    assert move.moved_bytes == moved_bytes
    assert rehearsal.moving_seconds == move.moving_seconds == MoveHistory().estimate(moved_bytes)
    before, after = (StepSeconds(trace)(0, layout) for layout in (EVEN, rehearsal.layouts[1]))
    assert (move.measured_before_seconds, move.measured_after_seconds) == (before, after)
    expected = move.iteration * before + (400 - move.iteration) * after
    assert rehearsal.stepping_seconds == pytest.approx(expected)
    assert rehearsal.static_seconds == pytest.approx(400 * before)
    later = [step for step in steps_of(rehearsal) if step > move.iteration]
    assert later[0] - move.iteration >= 20


def test_after_a_move_there_is_a_cool_down_and_only_new_step_times_count():
    trace = trace_of("stationary-skew", num_steps=200)
    move, later, *_ = run(trace, config_of(window=1, cooldown_steps=100)).rounds
    assert move.outcome is Outcome.COMMIT
    assert 100 <= later.iteration - move.iteration < 110
    # Right after the move the steps before it would still be half of the median.
    move, later, *_ = run(trace, config_of("at:20,25", window=1)).rounds
    assert later.measured_before_seconds == move.measured_after_seconds < move.measured_before_seconds


def test_scheduled_rounds_come_at_their_steps():
    assert steps_of(run(trace_of("stationary-skew", num_steps=50), config_of("every:20"))) == [20, 40]
    rehearsal = run(trace_of("stationary-skew", num_steps=50), config_of("at:1,30"))
    assert steps_of(rehearsal) == [1, 30]
    assert "nothing measured yet" in rehearsal.rounds[0].reason
    assert rehearsal.rounds[1].outcome is Outcome.COMMIT
    assert run(trace_of("stationary-skew"), config_of("off")).rounds == ()


def test_the_policy_is_heeded():
    skew = trace_of("stationary-skew")
    assert run(skew, config_of(min_gain=0.9)).num_moves == 0
    assert "min-gain" in run(skew, config_of(min_gain=0.9)).rounds[0].reason
    assert run(skew, config_of(horizon_steps=1)).num_moves == 0


def test_the_ends_are_measured_too():
    layers = (Cost(forward_seconds=0.01, backward_seconds=0.02),) * 8
    head = Cost(forward_seconds=0.02, backward_seconds=0.04)
    trace = Trace(frames=(Frame(step=1, layers=layers),), num_steps=300, num_microbatches=8, head=head)
    rehearsal = run(trace, layout=Layout.contiguous((4, 4)))
    assert rehearsal.layouts[-1].counts == (5, 3)
    snapshot = rehearsal.rounds[0].snapshot
    assert snapshot.head.forward_seconds == pytest.approx(0.02)
    assert snapshot.stages[1].forward_seconds == pytest.approx(0.06)
    busy = 8 * (4 * 0.03)
    assert snapshot.stages[0].wait_seconds == pytest.approx(snapshot.step_seconds - busy)


def test_costs_that_change_are_followed():
    light, heavy = Cost(forward_seconds=0.01, backward_seconds=0.02), Cost(forward_seconds=0.04, backward_seconds=0.08)
    front = (*(heavy,) * 4, *(light,) * 12)
    trace = Trace(frames=(Frame(step=1, layers=front), Frame(step=201, layers=front[::-1])), num_steps=400, num_microbatches=4)
    rehearsal = run(trace)
    moves = steps_of(rehearsal, Outcome.COMMIT)
    assert len(moves) == 2
    assert moves[0] < 201 < moves[1]
    first, second = (layout.counts for layout in rehearsal.layouts[1:])
    assert first[0] < 4 < first[-1]
    assert second[-1] < 4 < second[0]


def test_another_algorithm_finds_the_splits():
    # Diffusion stops at a local optimum of its own; that the layouts differ shows that it was asked.
    exact, diffusion = (run(trace_of("stationary-skew"), config_of(algorithm=name)) for name in ("exact", "diffusion"))
    assert diffusion.num_moves >= 1
    assert diffusion.layouts[1] != exact.layouts[1]


def test_an_algorithm_without_an_answer_is_a_reason():
    rehearsal = run(trace_of("stationary-skew", num_layers=18), config_of(algorithm="megatron-uniform"), EVEN_18)
    assert rehearsal.rounds[0].reason.startswith("no split is possible: ")


def test_every_step_is_told():
    told = []
    run(trace_of("moe", num_steps=25), advance=lambda: told.append(1))
    assert len(told) == 25


def test_a_layout_of_another_model_is_refused():
    with pytest.raises(ValueError, match="places 4 layers, the model has 16"):
        run(trace_of("moe"), layout=Layout.contiguous((1, 1, 1, 1)))
