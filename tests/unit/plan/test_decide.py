"""Decisions: every reason not to move, a Plan that is consistent, and never one that predicts a slower step."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.config import DecideConfig
from megatron_dyn.plan import (
    ASSUMED_BYTES_PER_SECOND,
    ASSUMED_FIXED_SECONDS,
    MoveHistory,
    decide,
    moves_between,
    simulate,
    stage_costs,
)
from megatron_dyn.records import Cost, Layout, LayoutError, NoChange, Plan, Snapshot

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""

EAGER = DecideConfig(min_gain=0.0, cooldown_steps=0)


def snapshot(
    text: str,
    seconds: list[float],
    *,
    head: float = 0.0,
    step_seconds: float = 0.0,
    num_microbatches: int = 8,
    moved_bytes: int = 1_000,
) -> Snapshot:
    """A job measured under layout `text`; a third of each layer's time is forward."""
    layout = Layout.parse(text, text.count("|") + 1)
    return Snapshot(
        iteration=50,
        layout=layout,
        layers=tuple(
            Cost(
                forward_seconds=value / 3,
                backward_seconds=value * 2 / 3,
                state_bytes=2 * moved_bytes,
                activation_bytes=moved_bytes // 2,
                moved_bytes=moved_bytes,
            )
            for value in seconds
        ),
        embedding=Cost(forward_seconds=0.125, backward_seconds=0.125),
        head=Cost(forward_seconds=head / 2, backward_seconds=head / 2),
        other_seconds=0.5,
        stages=(),
        step_seconds=step_seconds,
        num_microbatches=num_microbatches,
    )


def ask(
    measured: Snapshot,
    config: DecideConfig = EAGER,
    *,
    history: MoveHistory | None = None,
    remaining_steps: int = 10_000,
    steps_since_move: int | None = None,
    scheduled: bool = False,
) -> Plan | NoChange:
    """`decide` with a long run ahead and no move behind."""
    return decide(
        measured,
        config,
        history=history or MoveHistory(),
        remaining_steps=remaining_steps,
        steps_since_move=steps_since_move,
        scheduled=scheduled,
    )


def no_change(decision: Plan | NoChange) -> NoChange:
    """The decision, which must be NoChange."""
    assert isinstance(decision, NoChange)
    return decision


HEAVY_HEAD = snapshot("Et*4|t*4L", [1.0] * 8, head=2.0)


def test_a_heavy_head_gives_layers_away() -> None:
    """4|4 with a head of two layers becomes 5|3; the plan's numbers are the two simulations and the assumed cost."""
    plan = ask(HEAVY_HEAD)
    assert isinstance(plan, Plan)
    after = Layout.parse("Et*5|t*3L", 2)
    assert (plan.before, plan.after, plan.moves) == (HEAVY_HEAD.layout, after, moves_between(plan.before, after))
    assert plan.predicted_before_seconds == simulate(*stage_costs(HEAVY_HEAD, plan.before), 8).step_seconds
    assert plan.predicted_after_seconds == pytest.approx(simulate(*stage_costs(HEAVY_HEAD, after), 8).step_seconds)
    assert plan.predicted_cost_seconds == ASSUMED_FIXED_SECONDS + 1_000 / ASSUMED_BYTES_PER_SECOND
    assert "moving 1 layer:" in plan.reason
    assert "in 10000 steps" in plan.reason


def test_the_measured_step_is_what_the_gain_is_taken_from() -> None:
    """What the simulation does not know of (the optimizer, the data) stays in the prediction."""
    simulated = ask(HEAVY_HEAD)
    measured = ask(replace(HEAVY_HEAD, step_seconds=100.0))
    assert measured.predicted_before_seconds == 100.0
    assert simulated.predicted_before_seconds is not None and simulated.predicted_after_seconds is not None
    gain = simulated.predicted_before_seconds - simulated.predicted_after_seconds
    assert measured.predicted_after_seconds == pytest.approx(100.0 - gain)


def test_a_profile_slower_than_the_step_is_scaled_down() -> None:
    """Layers that took longer while sampled than the whole step does: the gain shrinks in proportion."""
    simulated = ask(HEAVY_HEAD)
    measured = ask(replace(HEAVY_HEAD, step_seconds=0.01))
    assert isinstance(simulated, Plan) and isinstance(measured, NoChange | Plan)
    assert simulated.predicted_before_seconds is not None and simulated.predicted_after_seconds is not None
    ratio = simulated.predicted_after_seconds / simulated.predicted_before_seconds
    assert measured.predicted_after_seconds == pytest.approx(0.01 * ratio)


def test_the_cool_down_holds_unless_the_step_is_scheduled() -> None:
    """Before the first move there is none."""
    config = replace(EAGER, cooldown_steps=20)
    reason = no_change(ask(HEAVY_HEAD, config, steps_since_move=19)).reason
    assert reason == "cool-down: 19 steps since the last move, 20 required"
    assert isinstance(ask(HEAVY_HEAD, config, steps_since_move=19, scheduled=True), Plan)
    assert isinstance(ask(HEAVY_HEAD, config, steps_since_move=20), Plan)
    assert isinstance(ask(HEAVY_HEAD, config), Plan)


def test_the_best_split_stays() -> None:
    """The reason names it."""
    decision = no_change(ask(snapshot("Et*5|t*3L", [1.0] * 8, head=2.0)))
    assert decision.reason == "the current split [5, 3] is already the best"
    assert decision.predicted_before_seconds == decision.predicted_after_seconds


def test_a_lower_bottleneck_that_saves_no_time_is_no_better() -> None:
    """One micro-batch visits every layer whatever the split."""
    decision = no_change(ask(replace(HEAVY_HEAD, num_microbatches=1)))
    assert decision.reason.startswith("no better split: the best found, [5, 3], would change ")


def test_a_small_gain_is_not_worth_it() -> None:
    """Also when the step is scheduled; the reason holds both fractions."""
    decision = no_change(ask(HEAVY_HEAD, replace(EAGER, min_gain=0.5), scheduled=True))
    assert decision.reason.startswith("gain below --dyn-min-gain: ")
    assert decision.reason.endswith("50.00% required")
    assert decision.predicted_after_seconds is not None and decision.predicted_before_seconds is not None
    assert decision.predicted_after_seconds < decision.predicted_before_seconds


@pytest.mark.parametrize(("factor", "kind"), [(0.999, Plan), (1.001, NoChange)])
def test_the_required_gain_is_a_fraction_of_the_step(factor: float, kind: type) -> None:
    """Just below what the move saves it is made, just above it is not."""
    plan = ask(HEAVY_HEAD)
    assert plan.predicted_before_seconds is not None and plan.predicted_after_seconds is not None
    saved = 1.0 - plan.predicted_after_seconds / plan.predicted_before_seconds
    assert isinstance(ask(HEAVY_HEAD, replace(EAGER, min_gain=saved * factor)), kind)


def test_a_heavy_embedding_gives_layers_away() -> None:
    """The first stage has its own load."""
    plan = ask(replace(HEAVY_HEAD, embedding=Cost(forward_seconds=1.0, backward_seconds=1.0), head=Cost()))
    assert isinstance(plan, Plan)
    assert plan.after.counts == (3, 5)


def test_of_equal_splits_the_nearest_is_taken() -> None:
    """Five equal layers on three stages: three splits are best, one is a single layer away."""
    measured = replace(snapshot("Et*3|t|tL", [1.0] * 5), embedding=Cost())
    plan = ask(measured)
    assert isinstance(plan, Plan)
    assert (plan.after.counts, [move.layer for move in plan.moves]) == ((2, 2, 1), [2])


@pytest.mark.parametrize(("heavy", "counts"), [(1, (1, 2, 2)), (3, (2, 2, 1))])
def test_of_equal_splits_the_lightest_move_is_taken(heavy: int, counts: tuple[int, ...]) -> None:
    """Layer 1 or layer 3 must leave stage 1: the one with fewer bytes does, and the cost is that of its bytes."""
    measured = replace(snapshot("Et|t*3|tL", [1.0] * 5), embedding=Cost())
    layers = tuple(replace(cost, moved_bytes=9_000) if layer == heavy else cost for layer, cost in enumerate(measured.layers))
    plan = ask(replace(measured, layers=layers))
    assert isinstance(plan, Plan)
    assert plan.after.counts == counts
    assert plan.predicted_cost_seconds == MoveHistory().estimate(1_000)


def test_noise_does_not_move_equal_layers() -> None:
    """Two per cent of noise on equal layers promises less than the default three per cent."""
    noisy = [1.0 + 0.02 * (-1) ** (layer // 2) for layer in range(16)]
    decision = ask(snapshot("Et*4|t*4|t*4|t*4L", noisy, head=0.25), DecideConfig())
    assert isinstance(decision, NoChange)


def test_the_gain_must_pay_within_the_horizon() -> None:
    """The horizon is the configured one, cut off by the end of the run."""
    slow = MoveHistory().observe(moved_bytes=1_000, seconds=30.0)
    plan = ask(HEAVY_HEAD, history=slow)
    assert isinstance(plan, Plan)
    assert plan.predicted_before_seconds is not None and plan.predicted_after_seconds is not None
    enough = int(30.0 / (plan.predicted_before_seconds - plan.predicted_after_seconds)) + 1
    for config, remaining in (
        (replace(EAGER, horizon_steps=enough - 1), 10_000),
        (EAGER, enough - 1),
        (replace(EAGER, horizon_steps=10_000), enough - 1),
    ):
        reason = no_change(ask(HEAVY_HEAD, config, history=slow, remaining_steps=remaining)).reason
        assert reason.startswith("gain does not pay for the move: ")
        assert f"in {enough - 1} steps, the move costs 30 s" in reason
    assert isinstance(ask(HEAVY_HEAD, history=slow, remaining_steps=enough), Plan)


@pytest.mark.parametrize("remaining_steps", [0, -3])
def test_nothing_moves_at_the_end_of_the_run(remaining_steps: int) -> None:
    """There is no step left to gain in."""
    decision = no_change(ask(HEAVY_HEAD, remaining_steps=remaining_steps))
    assert decision.reason == f"the run is about to end: {remaining_steps} steps remain"


def test_the_memory_cap_decides_with_the_time() -> None:
    """Five layers on stage 0 need 5 * (2000 + 2 * 500) bytes: under that the best split is not available."""
    assert isinstance(ask(HEAVY_HEAD, replace(EAGER, stage_memory_bytes=15_000)), Plan)
    decision = no_change(ask(HEAVY_HEAD, replace(EAGER, stage_memory_bytes=14_999)))
    assert decision.reason == "the current split [4, 4] is already the best under --dyn-stage-memory-gib 1.397e-05"


def test_a_cap_that_nothing_fits_names_the_stage() -> None:
    """The reason is the planner's own, with the flag before it."""
    reason = no_change(ask(HEAVY_HEAD, replace(EAGER, stage_memory_bytes=10_000))).reason
    assert reason == (
        "no split is possible under --dyn-stage-memory-gib 9.313e-06: expected at most 10000 bytes on each stage, got "
        "12500 on stage 1 for layers 3..7, with the stages filled in order"
    )


def test_empty_stages_are_filled_unless_allowed() -> None:
    """A head so heavy that its stage should hold nothing else."""
    measured = snapshot("Et*2|t*2L", [1.0] * 4, head=9.0)
    plan, other = ask(measured), ask(measured, replace(EAGER, allow_empty_stages=True))
    assert isinstance(plan, Plan) and isinstance(other, Plan)
    assert (plan.after.counts, other.after.counts) == ((3, 1), (4, 0))


def test_too_few_layers_is_a_reason_not_a_crash() -> None:
    """Two layers on three stages, one of them empty."""
    reason = no_change(ask(snapshot("Et|t|L", [1.0, 5.0]))).reason
    assert reason == "no split is possible: expected at least 3 layers, one for each of 3 stages, got 2"


def test_stages_behind_mtp_and_loss_stay_without_layers() -> None:
    """A decoder layer must not follow an MTP layer: stage 2 stays as it is, and MTP and loss where they are."""
    plan = ask(snapshot("Et*6|t*2m|L", [1.0] * 8, head=2.0))
    assert isinstance(plan, Plan)
    assert plan.after == Layout.parse("Et*4|t*4m|L", 3)
    plan = ask(snapshot("Et*6|t*2L|", [1.0] * 8))
    assert isinstance(plan, Plan)
    assert plan.after == Layout.parse("Et*4|t*4L|", 3)


def test_the_glm_layout_is_rebalanced() -> None:
    """users.md C1 through the whole decision: MTP and loss stay last, the slowest stage falls from 29.7 to 25.6."""
    measured = replace(
        snapshot("Et*18|t*24|t*24|t*12m*7L", [1.067] * 78, head=16.9, num_microbatches=64),
        embedding=Cost(),
        other_seconds=0.0,
    )
    plan = ask(measured, DecideConfig())
    assert isinstance(plan, Plan)
    assert plan.after.text == "Et*22|t*24|t*24|t*8m*7L"
    busy = [forward + backward for forward, backward in zip(*stage_costs(measured, plan.after), strict=True)]
    assert max(busy) == pytest.approx(24 * 1.067)


@pytest.mark.parametrize(
    ("measured", "message"),
    [
        (replace(HEAVY_HEAD, layout=Layout.parse("Et*2|t*2|t*2|t*2L", 2)), "one model chunk per stage, got 2"),
        (replace(HEAVY_HEAD, layout=Layout.parse("|Et*8L", 2)), "embedding on stage 0, got ''"),
    ],
)
def test_unsupported_layouts_are_refused(measured: Snapshot, message: str) -> None:
    """The message holds the layout."""
    with pytest.raises(ValueError, match=message):
        ask(measured)


def test_a_snapshot_of_another_model_is_refused() -> None:
    """Costs for fewer layers than the layout places."""
    with pytest.raises(LayoutError, match="places 8 layers, the model has 7"):
        ask(replace(HEAVY_HEAD, layers=HEAVY_HEAD.layers[:7]))


LAYOUTS = st.sampled_from(
    ["Ett|ttt|tttL", "Et*8L", "E|t*7|tL", "Et*4|t*4m|L", "Ettttt|tt|t|L", "Et|t|t|t|t|t|t|tL", "Et*2|t*6mL"]
)


@settings(PATIENT, max_examples=200)
@given(
    text=LAYOUTS,
    seconds=st.lists(st.floats(0.0, 10.0), min_size=8, max_size=8),
    head=st.floats(0.0, 10.0),
    step_seconds=st.floats(0.0, 100.0),
    num_microbatches=st.integers(1, 9),
    config=st.builds(
        DecideConfig,
        min_gain=st.sampled_from([0.0, 0.03, 0.3]),
        horizon_steps=st.none() | st.integers(1, 1000),
        allow_empty_stages=st.booleans(),
        stage_memory_bytes=st.none() | st.integers(1, 60_000),
    ),
    remaining_steps=st.integers(0, 2000),
)
def test_every_plan_keeps_its_promises(
    text: str,
    seconds: list[float],
    head: float,
    step_seconds: float,
    num_microbatches: int,
    config: DecideConfig,
    remaining_steps: int,
) -> None:
    """Each layer once and in order, a shorter step that pays, within cap and minimum; and the same answer again."""
    measured = snapshot(text, seconds, head=head, step_seconds=step_seconds, num_microbatches=num_microbatches)
    decision = ask(measured, config, remaining_steps=remaining_steps)
    assert decision == ask(measured, config, remaining_steps=remaining_steps)
    assert decision.reason
    if isinstance(decision, NoChange):
        assert decision.layout == measured.layout
        return
    before, after, cost = (
        decision.predicted_before_seconds,
        decision.predicted_after_seconds,
        decision.predicted_cost_seconds,
    )
    assert before is not None and after is not None and cost is not None
    assert 0.0 <= after < before
    assert before - after >= config.min_gain * before
    assert (before - after) * min(config.horizon_steps or remaining_steps, remaining_steps) > cost
    assert decision.moves == moves_between(measured.layout, decision.after) != ()
    placed = [layer for stage in range(decision.after.num_stages) for layer in decision.after.layers_of_stage(stage)]
    assert placed == list(range(8))
    simulated = [
        simulate(*stage_costs(measured, layout), num_microbatches).step_seconds for layout in (measured.layout, decision.after)
    ]
    assert simulated[1] < simulated[0]


def test_an_estimate_before_any_move_is_the_documented_assumption() -> None:
    """A fixed second and a gigabyte a second."""
    assert MoveHistory().estimate(0) == ASSUMED_FIXED_SECONDS
    assert MoveHistory().estimate(3 * 10**9) == ASSUMED_FIXED_SECONDS + 3.0


def test_an_estimate_follows_the_slowest_of_the_last_three_moves() -> None:
    """In proportion to the assumption; a slow first move is forgotten after three others."""
    history = MoveHistory().observe(moved_bytes=10**9, seconds=20.0)
    assert history.estimate(10**9) == 20.0
    assert history.estimate(3 * 10**9) == 40.0
    for seconds in (1.0, 4.0, 2.0):
        history = history.observe(moved_bytes=10**9, seconds=seconds)
    assert history.estimate(10**9) == 4.0


@PATIENT
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0.0, 1e4)), max_size=5), st.integers(0, 10**12))
def test_an_estimate_grows_with_the_bytes(moves: list[tuple[int, float]], moved_bytes: int) -> None:
    """And is never negative; observing changes the copy only."""
    history = MoveHistory()
    for size, seconds in moves:
        history = history.observe(moved_bytes=size, seconds=seconds)
    assert history.observations == tuple(moves)
    assert 0.0 <= history.estimate(moved_bytes) <= history.estimate(moved_bytes + 10**9)


@pytest.mark.parametrize(("moved_bytes", "seconds"), [(-1, 1.0), (1, -1.0), (1, float("nan")), (1, float("inf"))])
def test_an_impossible_observation_is_refused(moved_bytes: int, seconds: float) -> None:
    """The message holds both numbers."""
    with pytest.raises(ValueError, match=f"got {moved_bytes} bytes and {seconds} s"):
        MoveHistory().observe(moved_bytes=moved_bytes, seconds=seconds)
