"""Freezing as a family, on a stand-in of the job: what it asks for, when, and what it says."""

import pytest
import torch

from megatron_dyn.dynamics.freezing.family import Freezing
from megatron_dyn.dynamics.freezing.settings import FreezeSettings
from megatron_dyn.testing.dynamics import FakeJob


def family_of(text, *, num_layers=6, num_steps=20, **options):
    settings = FreezeSettings.parse(text, num_layers=num_layers, **options)
    family = Freezing(settings, num_layers=num_layers, num_steps=num_steps)
    job = FakeJob({layer: torch.nn.Linear(3, 3) for layer in range(num_layers)})
    return family, job


def test_a_schedule_freezes_at_its_steps_and_says_so():
    family, job = family_of('{"0-2": [0, 5], "4": [3, -1]}', state="park")
    family.begin(job, 0, None)
    family.start(0)
    assert job.frozen == [(frozenset({0, 1, 2}), True, True)]
    said = [(step, change.what, change.changes_costs) for step in range(1, 8) for change in family.at_boundary(step)]
    assert said == [(3, "layers 4 frozen", True), (5, "layers 0-2 train again", True)]
    assert [call[0] for call in job.frozen[1:]] == [{0, 1, 2, 4}, {4}]
    assert [call[1] for call in job.frozen[1:]] == [True, False]


def test_notes_say_what_backward_a_layer_has():
    family, job = family_of('{"0-1": -1, "3": -1}')
    family.begin(job, 0, None)
    family.start(0)
    assert [family.notes(layer)["backward"] for layer in range(6)] == ["none", "none", "full", "input only", "full", "full"]


def test_with_a_trainable_embedding_no_layer_is_without_backward():
    family, job = family_of('{"0-1": -1}', embedding="never")
    family.begin(job, 0, None)
    family.start(0)
    assert job.frozen == [(frozenset({0, 1}), False, False)]
    assert family.notes(0) == {"frozen": True, "backward": "input only"}


def test_a_resumed_run_freezes_before_it_loads_what_was_frozen_when_it_was_saved():
    family, job = family_of('{"0-2": [0, 5], "4": [3, -1]}')
    family.begin(job, 0, None)
    family.start(0)
    for step in (1, 2, 3):
        family.at_boundary(step)
    resumed, other = family_of('{"0-2": [0, 5], "4": [3, -1]}')
    resumed.begin(other, 3, family.state())
    assert other.frozen == [(frozenset({0, 1, 2, 4}), True, False)]
    resumed.start(3)
    assert set(other.frozen) == {(frozenset({0, 1, 2, 4}), True, False)}


def test_autofreeze_sees_every_steps_gradients_and_freezes_from_the_front():
    family, job = family_of("autofreeze:percentile=60,evaluations=10", num_layers=4)
    family.begin(job, 0, None)
    family.start(0)
    frozen = []
    for step in range(1, 7):
        for layer, module in job.layers.items():
            # The gradients of the first layers stand still, those of the last change from step to step.
            value = 1.0 if layer < 2 else 1.0 + step * layer
            module.weight.grad, module.bias.grad = torch.full((3, 3), value), torch.zeros(3)
        family.after_gradients(step)
        frozen += [change.details["frozen_layers"] for change in family.at_boundary(step)]
    assert frozen[0] == [0, 1]


@pytest.mark.parametrize("told", [0.0, 0.25])
def test_egeria_takes_one_reading_a_step_of_the_layer_it_watches(told, monkeypatch):
    from megatron_dyn.dynamics.freezing import family as module

    calls = []
    monkeypatch.setattr(module, "plasticity", lambda layer, args, kwargs: calls.append(layer) or told)
    family, job = family_of("egeria:interval=2,window=2,update=4")
    for layer, linear in job.layers.items():
        family.attach(layer, linear)
    family.begin(job, 0, None)
    family.start(0)
    for step in range(1, 5):
        family.before_step(step)
        for _ in range(2):
            for linear in job.layers.values():
                linear(torch.zeros(1, 3))
        family.at_boundary(step)
    assert calls == [job.layers[0]] * 2
    assert family.state()["plasticity"]["readings"] == (told, told)
