"""The GPU twins of what the CPU tests prove: events as clock, checksum and codec on the device, the allocator's meter."""

import math

import pytest
import torch

from megatron_dyn.host.activations import AllocatorMeter
from megatron_dyn.host.clock import CudaEventClock
from megatron_dyn.host.grad_norm import exact_norm, exponent_of, sum_squares
from megatron_dyn.measure import Kind, Recorder, Slot
from megatron_dyn.migrate import Key, LayerState, allocate, describe, digest, flat_bytes

pytestmark = pytest.mark.gpu


def work(num_rounds):
    matrix = torch.randn(2048, 2048, device="cuda")
    for _ in range(num_rounds):
        matrix = matrix @ matrix / 2048
    return matrix


def test_events_time_the_device_and_nothing_waits_before_settle():
    work(4)
    recorder = Recorder(CudaEventClock())
    recorder.begin()
    recorder.switch(Slot(Kind.LAYER, 0))
    work(40)
    recorder.switch(Slot(Kind.LAYER, 1))
    work(10)
    seconds = recorder.end(1).seconds
    assert seconds[Slot(Kind.LAYER, 0)] > 2 * seconds[Slot(Kind.LAYER, 1)] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_layer_can_be_received_on_the_device(dtype):
    weight = (torch.randn(257, 33, device="cuda") * 100).to(dtype)
    state = LayerState(layer=3, tensors={Key("parameter", "weight"): weight})
    received = allocate(describe(state), weight.device)
    for target, source in zip(flat_bytes(received), flat_bytes(state), strict=True):
        target.copy_(source)
    assert torch.equal(received.tensors[Key("parameter", "weight")], weight)
    assert digest(received) == digest(state)


def digest_of(buffer):
    return digest(LayerState(layer=0, tensors={Key("parameter", "weight"): buffer}))


def test_a_flipped_bit_changes_the_digest_on_the_device():
    buffer = torch.randint(0, 256, (1 << 23,), dtype=torch.uint8, device="cuda")
    before = digest_of(buffer)
    for place in (0, 12_345, buffer.numel() - 1):
        buffer[place] ^= 1
        assert digest_of(buffer) != before
        buffer[place] ^= 1
    assert digest_of(buffer) == before


def test_swapped_words_change_the_digest_on_the_device():
    buffer = torch.arange(64, dtype=torch.int32, device="cuda")
    assert digest_of(buffer) != digest_of(buffer.flip(0))


def test_the_meter_sees_what_the_allocator_gives():
    meter = AllocatorMeter()
    slot = Slot(Kind.LAYER, 0)
    with meter.weighing(lambda: slot):
        kept = torch.empty(1 << 20, device="cuda")
        meter.note(slot)
    assert meter.done
    assert meter.bytes_by_slot[slot] >= kept.numel() * 4


def test_the_exact_norm_of_pieces_is_that_of_the_whole_and_of_the_cpu():
    # More than a block; cut so that no piece begins at a row.
    gradient = torch.randn((1 << 21) + 12_345, device="cuda")
    exponent = exponent_of([gradient])
    total = sum_squares([gradient], exponent)
    assert sum(sum_squares([piece], exponent) for piece in gradient.split(123_457)) == total
    assert (exponent_of([gradient.cpu()]), sum_squares([gradient.cpu()], exponent)) == (exponent, total)
    assert exact_norm(total, exponent) == pytest.approx(float(gradient.double().norm()), rel=1e-7)  # one rounding to fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_exponent_tells_infinity_and_not_a_number_on_the_device(dtype):
    gradient = torch.ones(100_003, device="cuda", dtype=dtype)
    gradient[77] = -math.inf
    assert exact_norm(0, exponent_of([gradient])) == math.inf
    gradient[99_999] = math.nan
    assert math.isnan(exact_norm(0, exponent_of([gradient[:9], gradient])))
