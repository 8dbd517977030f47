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
    workload_of,
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
    speeds: tuple[float, ...] | None = None,
) -> Plan | NoChange:
    """`decide` with a long run ahead and no move behind."""
    return decide(
        measured,
        config,
        history=history or MoveHistory(),
        remaining_steps=remaining_steps,
        steps_since_move=steps_since_move,
        scheduled=scheduled,
        speeds=speeds,
    )


def simulated_step(measured: Snapshot, layout: Layout) -> float:
    """One step of `measured` under `layout`."""
    times = workload_of(measured).chunk_times(layout)
    return simulate(times.forward_seconds, times.backward_seconds, measured.num_microbatches).step_seconds


def no_change(decision: Plan | NoChange) -> NoChange:
    assert isinstance(decision, NoChange)
    return decision


HEAVY_HEAD = snapshot("Et*4|t*4L", [1.0] * 8, head=2.0)


def test_a_heavy_head_gives_layers_away() -> None:
    """4|4 with a head of two layers becomes 5|3; the plan's numbers are the two simulations and the assumed cost."""
    plan = ask(HEAVY_HEAD)
    assert isinstance(plan, Plan)
    after = Layout.parse("Et*5|t*3L", 2)
    assert (plan.before, plan.after, plan.moves) == (HEAVY_HEAD.layout, after, moves_between(plan.before, after))
    assert plan.predicted_before_seconds == pytest.approx(simulated_step(HEAVY_HEAD, plan.before))
    assert plan.predicted_after_seconds == pytest.approx(simulated_step(HEAVY_HEAD, after))
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
    decision = no_change(ask(snapshot("Et*5|t*3L", [1.0] * 8, head=2.0)))
    assert decision.reason == "the current split [5, 3] is already the best"
    assert decision.predicted_before_seconds == decision.predicted_after_seconds


def test_a_better_split_that_does_not_pay_is_not_called_the_best() -> None:
    """Staying costs nothing, which must not make it the candidate."""
    measured = replace(snapshot("Et*2|t*2|t*3|t*4L", [0.001] * 11), step_seconds=0.0365, other_seconds=0.0, embedding=Cost())
    decision = no_change(ask(measured, remaining_steps=20))
    assert decision.reason.startswith("gain does not pay for the move: ")


def test_a_lower_bottleneck_that_saves_no_time_is_no_better() -> None:
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
    plan = ask(replace(HEAVY_HEAD, embedding=Cost(forward_seconds=1.0, backward_seconds=1.0), head=Cost()))
    assert isinstance(plan, Plan)
    assert plan.after.counts == (3, 5)


def test_of_equal_splits_the_nearest_is_taken() -> None:
    """Five equal layers on three stages: three splits are best, one is a single layer away."""
    measured = replace(snapshot("Et*3|t|tL", [1.0] * 5), embedding=Cost())
    plan = ask(measured)
    assert isinstance(plan, Plan)
    assert (plan.after.counts, [move.layer for move in plan.moves]) == ((2, 2, 1), [2])


def test_a_slightly_shorter_step_is_worth_more_bytes_only_if_the_horizon_is_long() -> None:
    """Layer 1 or layer 3 must leave stage 1: the one with fewer bytes, or the one that fills the pipeline faster."""
    measured = replace(snapshot("Et|t*3|tL", [1.0] * 5), embedding=Cost())
    layers = tuple(replace(cost, moved_bytes=10**10) if layer == 1 else cost for layer, cost in enumerate(measured.layers))
    measured = replace(measured, layers=layers)
    assert simulated_step(measured, Layout.parse("Ett|tt|tL", 3)) < simulated_step(measured, Layout.parse("Et|tt|ttL", 3))
    soon, late = ask(measured, remaining_steps=3), ask(measured, remaining_steps=30)
    assert isinstance(soon, Plan) and isinstance(late, Plan)
    assert (soon.after.counts, late.after.counts) == ((1, 2, 2), (2, 2, 1))
    assert soon.predicted_cost_seconds == MoveHistory().estimate(1_000)


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
    measured = snapshot("Et*2|t*2L", [1.0] * 4, head=9.0)
    plan, other = ask(measured), ask(measured, replace(EAGER, allow_empty_stages=True))
    assert isinstance(plan, Plan) and isinstance(other, Plan)
    assert (plan.after.counts, other.after.counts) == ((3, 1), (4, 0))


def test_too_few_layers_is_a_reason_not_a_crash() -> None:
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
    assert plan.after.text == "Et*24|t*23|t*23|t*8m*7L"
    times = workload_of(measured).chunk_times(plan.after)
    busy = [sum(pair) for pair in zip(times.forward_seconds, times.backward_seconds, strict=True)]
    assert max(busy) == pytest.approx(24 * 1.067)


def test_virtual_stages_are_weighed_by_rank() -> None:
    """Rank 0 has the heavy layers of both its chunks: some of them go to rank 1, and the step is shorter."""
    heavy = replace(
        snapshot("Ett|tt|tt|ttL", [3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0]), layout=Layout.parse("Ett|tt|tt|ttL", 2)
    )
    plan = ask(heavy)
    assert isinstance(plan, Plan)
    assert plan.after.num_virtual == 2
    work = [sum(heavy.layers[layer].seconds for layer in plan.after.layers_of_stage(rank)) for rank in range(2)]
    assert max(work) < 12.0
    assert plan.predicted_after_seconds is not None and plan.predicted_before_seconds is not None
    assert plan.predicted_after_seconds < 0.9 * plan.predicted_before_seconds


def test_a_schedule_that_cannot_be_simulated_is_a_reason_not_a_crash() -> None:
    """Seven micro-batches in groups of two: Megatron refuses that, and a run that trains all the same must not end here."""
    measured = snapshot("Ett|tt|tt|ttL", [3.0, 3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 1.0], num_microbatches=7)
    reason = no_change(ask(replace(measured, layout=Layout.parse("Ett|tt|tt|ttL", 2)))).reason
    assert reason.startswith("no split is possible: schedule: ")


def test_an_embedding_behind_the_first_stage_is_refused() -> None:
    with pytest.raises(ValueError, match="embedding on stage 0, got ''"):
        ask(replace(HEAVY_HEAD, layout=Layout.parse("|Et*8L", 2)))


def test_a_gain_must_show_in_every_sample_unless_the_step_is_scheduled() -> None:
    """A hot spot that was elsewhere once is no reason to move; a steady one is."""
    median = snapshot("Et*4|t*4L", [3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    steady, elsewhere = (3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 3.0, 3.0)
    assert isinstance(ask(replace(median, readings=(steady, steady, steady))), Plan)
    wandering = replace(median, readings=(steady, elsewhere, steady))
    decision = no_change(ask(wandering))
    assert decision.reason.startswith("the gain is not there in every sample: in sample 2 of 3 the split [2, 6] would change ")
    assert isinstance(ask(wandering, scheduled=True), Plan)


def test_a_known_change_of_costs_ends_the_horizon() -> None:
    """The move has to pay before it: measured at step 50, changes after 60 and 90."""
    config = replace(EAGER, cost_changes_at=(40, 60, 90))
    slow = MoveHistory().observe(moved_bytes=1_000, seconds=90.0)
    reason = no_change(ask(HEAVY_HEAD, config, history=slow)).reason
    assert "in 10 steps, the move costs 90 s" in reason
    assert isinstance(ask(HEAVY_HEAD, replace(config, cost_changes_at=(40, 6000)), history=slow), Plan)
    assert isinstance(ask(HEAVY_HEAD, replace(config, cost_changes_at=(40,)), history=slow), Plan)


def test_a_slow_rank_gets_fewer_layers() -> None:
    """Layers that took twice as long on rank 1 because the rank is slow are no heavier on rank 0."""
    measured = replace(snapshot("Et*6|t*6L", [1.0] * 6 + [2.0] * 6), embedding=Cost(), other_seconds=0.0)
    plan = ask(measured, speeds=(1.0, 0.5))
    assert isinstance(plan, Plan)
    assert plan.after.counts == (8, 4)
    # Taken for heavy layers, moving one or two of them would seem to help.
    assert ask(measured) != plan


def test_a_snapshot_of_another_model_is_refused() -> None:
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
    assert simulated_step(measured, decision.after) < simulated_step(measured, measured.layout)
