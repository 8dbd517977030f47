"""Activation meters: what a forward keeps for its backward is weighed once, by piece, and training does not notice."""

import gc
import weakref

import pytest
import torch

from megatron_dyn.host.activations import AllocatorMeter, SavedTensorMeter, activation_meter
from megatron_dyn.measure import Kind, Slot

FIRST, SECOND = Slot(Kind.LAYER, 0), Slot(Kind.LAYER, 1)
FLOAT_BYTES = 4


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))


def forward(model, data, meter):
    """Weigh one forward; the first layer's share and the second's are told apart."""
    owner = FIRST
    with meter.weighing(lambda: owner):
        hidden = model[0](data)
        owner = SECOND
        output = model[1](hidden)
        return (output * output).sum()


def test_each_saved_tensor_is_weighed_with_its_piece_and_parameters_are_not(model):
    meter = SavedTensorMeter(model.parameters())
    forward(model, torch.ones(4, 3), meter)
    # Layer 0 keeps its input; layer 1 keeps the hidden state, and the square its own input, counted once.
    assert meter.bytes_by_slot == {FIRST: 4 * 3 * FLOAT_BYTES, SECOND: (4 * 5 + 4 * 2) * FLOAT_BYTES}
    assert meter.done


def test_a_view_counts_as_the_storage_it_keeps_alive_and_only_once(model):
    meter = SavedTensorMeter(model.parameters())
    whole = torch.ones(10, 3)
    with meter.weighing(lambda: FIRST):
        model[0](whole[:2]) + model[0](whole[2:4])
    assert meter.bytes_by_slot == {FIRST: 10 * 3 * FLOAT_BYTES}


def test_gradients_are_the_same_in_every_bit_with_and_without(model):
    gradients = []
    for weigh in (False, True):
        model.zero_grad()
        data = torch.linspace(0, 1, 12).view(4, 3)
        if weigh:
            forward(model, data, SavedTensorMeter(model.parameters())).backward()
        else:
            model(data).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(torch.equal(plain, weighed) for plain, weighed in zip(*gradients, strict=True))


def test_outside_of_the_block_nothing_is_weighed(model):
    meter = SavedTensorMeter(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    assert (dict(meter.bytes_by_slot), meter.done) == ({}, False)


def test_activations_are_freed_after_the_backward_without_a_garbage_collection(model):
    meter = SavedTensorMeter(model.parameters())
    hidden = []
    handle = model[0].register_forward_hook(lambda module, args, output: hidden.append(weakref.ref(output)))
    gc.disable()
    try:
        forward(model, torch.ones(4, 3), meter).backward()
        assert hidden[0]() is None
    finally:
        gc.enable()
        handle.remove()


class TestAllocator:
    @pytest.fixture
    def allocated(self, monkeypatch):
        """What the CUDA allocator says it holds, to be set by the test."""
        holder = {"bytes": 1000}
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: holder["bytes"])
        return holder

    def test_growth_belongs_to_the_piece_that_was_running(self, allocated):
        meter = AllocatorMeter()
        with meter.weighing(lambda: SECOND):
            allocated["bytes"] = 1300
            meter.note(FIRST)
            allocated["bytes"] = 1350
        assert meter.bytes_by_slot == {FIRST: 300, SECOND: 50}
        assert meter.done

    def test_a_piece_that_freed_more_than_it_kept_weighs_nothing(self, allocated):
        meter = AllocatorMeter()
        with meter.weighing(lambda: SECOND):
            allocated["bytes"] = 400
            meter.note(FIRST)
        assert meter.bytes_by_slot == {FIRST: 0, SECOND: 0}

    def test_notices_outside_of_the_block_are_ignored(self, allocated):
        meter = AllocatorMeter()
        meter.note(FIRST)
        with meter.weighing(lambda: SECOND):
            pass
        allocated["bytes"] = 9000
        meter.note(FIRST)
        assert meter.bytes_by_slot == {SECOND: 0}

    def test_a_failing_forward_ends_the_weighing(self, allocated):
        meter = AllocatorMeter()
        with pytest.raises(RuntimeError, match="boom"), meter.weighing(lambda: SECOND):
            raise RuntimeError("boom")
        allocated["bytes"] = 9000
        meter.note(FIRST)
        assert meter.bytes_by_slot == {SECOND: 0}


@pytest.mark.parametrize(("device", "kind"), [("cuda:0", AllocatorMeter), ("cpu", SavedTensorMeter)])
def test_the_meter_is_chosen_by_where_the_model_lives(device, kind):
    assert type(activation_meter([], torch.device(device))) is kind
