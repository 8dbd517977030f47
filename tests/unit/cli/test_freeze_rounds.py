"""Freeze schedules played through: plans, moves, and what is rebuilt (cases C7 and C9)."""

import pytest

from megatron_dyn.cli import freeze_rounds as freeze_rounds_module
from megatron_dyn.cli.freeze import parse_schedule, unit_layers
from megatron_dyn.cli.freeze_rounds import freeze_rounds
from megatron_dyn.config import DecideConfig
from megatron_dyn.plan import decide
from megatron_dyn.plan.pipeline.simulator import simulate_pipeline
from megatron_dyn.plan.workload import Workload, workload_of
from megatron_dyn.records import Cost, Layout, NoChange, Plan

C9 = '{"0-7": [0, 200], "8-15": [50, -1], "16-19": [10, 100]}'


def rounds_of(text, *, counts=(6, 6, 6, 6), num_steps=1000, train_embedding=False, config=None, unit_seconds=1.0, **more):
    num_layers = sum(counts)
    layers = tuple(
        Cost(
            forward_seconds=cost.forward_seconds * unit_seconds,
            backward_seconds=cost.backward_seconds * unit_seconds,
            backward_weight_seconds=cost.backward_weight_seconds * unit_seconds,
        )
        for cost in unit_layers(num_layers)
    )
    return freeze_rounds(
        parse_schedule(text, num_layers=num_layers),
        Workload(layers=layers, num_microbatches=16, **more),
        Layout.contiguous(counts),
        config or DecideConfig(),
        num_steps=num_steps,
        train_embedding=train_embedding,
    )


def test_c9_every_change_is_a_round():
    rounds = rounds_of(C9)
    assert [item.step for item in rounds] == [0, 10, 50, 100, 200]
    assert [item.newly_frozen for item in rounds[:3]] == [tuple(range(8)), tuple(range(16, 20)), tuple(range(8, 16))]
    assert [item.newly_trained for item in rounds[3:]] == [tuple(range(16, 20)), tuple(range(8))]
    assert rounds[-1].frozen == tuple(range(8, 16))


def test_c7_a_frozen_prefix_is_balanced_to_15():
    first = rounds_of('{"0-7": [0, -1]}')[0]
    assert first.stage_seconds_before == (6.0, 14.0, 18.0, 18.0)
    assert max(first.stage_seconds_after) == 15.0
    assert sum(first.layout.counts) == 24
    assert min(first.layout.counts) >= 1


def test_c7_frozen_layers_behind_trainable_ones_give_no_move():
    (only,) = rounds_of('{"4-11": [0, -1]}')
    assert isinstance(only.decision, NoChange)
    assert max(only.stage_seconds_before) == 18.0
    assert only.rebuilt_stages == ()


def test_what_freezes_after_wrapping_is_rebuilt_where_it_is():
    rounds = rounds_of('{"0-1": [0, 10], "22-23": [10, 12]}', config=DecideConfig(min_gain=0.99))
    # At step 0 the model is built frozen; later the stages that hold 0-1 and 22-23 have to be made anew.
    assert [item.rebuilt_stages for item in rounds] == [(), (0, 3), (3,)]
    assert all(isinstance(item.decision, NoChange) for item in rounds)


def test_a_move_rebuilds_the_stages_it_touches():
    rounds = rounds_of(C9)
    moved = rounds[2]
    assert isinstance(moved.decision, Plan)
    touched = {stage for move in moved.decision.moves for stage in (move.source, move.destination)}
    assert touched <= set(moved.rebuilt_stages)


def test_a_move_has_to_pay_before_the_next_known_change():
    # The first schedule thaws again before 1 s (what a move is assumed to take) is saved.
    brief, long = '{"0-5": [10, 12]}', '{"0-5": [10, -1]}'
    assert isinstance(rounds_of(brief, unit_seconds=0.005)[0].decision, NoChange)
    assert isinstance(rounds_of(long, unit_seconds=0.005)[0].decision, Plan)


def test_the_job_starts_at_the_best_layout_for_nothing():
    assert isinstance(rounds_of('{"0-7": [0, 3]}', unit_seconds=1e-5)[0].decision, Plan)


def test_the_embedding_is_frozen_with_layer_0_unless_it_trains():
    embedding = Cost(forward_seconds=1.0, backward_seconds=2.0)
    frozen = rounds_of('{"0": -1}', embedding=embedding)[0]
    trains = rounds_of('{"0": -1}', embedding=embedding, train_embedding=True)[0]
    assert frozen.costs[0].seconds == 1.0
    assert frozen.stage_seconds_before[0] == pytest.approx(1.0 + 1.0 + 15.0)
    assert trains.costs[0].seconds == 2.0
    assert trains.stage_seconds_before[0] == pytest.approx(3.0 + 2.0 + 15.0)


def test_overlaps_that_change_nothing_and_steps_behind_the_end_are_left_out():
    assert [item.step for item in rounds_of('{"0-7": [0, -1], "0-3": [5, 8]}')] == [0]
    assert [item.step for item in rounds_of('{"0-7": [5, 2000]}')] == [5]


def test_virtual_stages_have_what_every_chunk_computes(monkeypatch):
    seen = []
    monkeypatch.setattr(freeze_rounds_module, "decide", lambda *args, **kwargs: seen.append(args[0]) or decide(*args, **kwargs))
    layout = Layout.contiguous([2, 2, 2, 2], num_stages=2)
    workload = Workload(layers=unit_layers(8), num_microbatches=8, other_seconds=0.5)
    schedule = parse_schedule('{"0-1": 5}', num_layers=8)
    (only, *_) = freeze_rounds(schedule, workload, layout, DecideConfig(), num_steps=1000, train_embedding=False)
    assert workload_of(seen[0]).other_seconds == 0.5
    assert only.decision.predicted_before_seconds == pytest.approx(
        simulate_pipeline(
            Workload(layers=only.costs, num_microbatches=8, other_seconds=0.5).chunk_times(layout), 8
        ).step_seconds
    )


@pytest.mark.parametrize(
    "field", [{"p2p_seconds": 0.2}, {"speeds": (1.0, 1.0, 1.0, 2.0)}, {"uncut": (3,)}, {"mtp": Cost(forward_seconds=1)}]
)
def test_what_would_be_left_out_is_refused(field):
    with pytest.raises(ValueError, match=f"freeze_rounds: {next(iter(field))}: expected"):
        rounds_of(C9, **field)
