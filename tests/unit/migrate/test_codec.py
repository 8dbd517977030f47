"""Codec: a layer's whole state to one buffer and back, bit by bit; nothing damaged is ever accepted."""

import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn.migrate import CodecError, Entry, Key, LayerState, Manifest, checksum, pack, unpack, verify
from megatron_dyn.migrate.codec import allocate
from megatron_dyn.testing.fakes import small_layer

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.complex64,
]


def raw(tensor):
    """The tensor's bytes, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).tolist()


@st.composite
def tensors(draw):
    """A tensor of any dtype and shape, of any bits (NaNs and denormals too), sometimes not contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    num_bytes = math.prod(shape) * dtype.itemsize
    bits = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
    tensor = torch.tensor(list(bits), dtype=torch.uint8).view(dtype).view(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


@st.composite
def states(draw):
    """A layer with up to five tensors."""
    drawn = draw(st.lists(tensors(), max_size=5))
    kinds = ("parameter", "main", "optimizer:exp_avg", "buffer", "extra")
    return LayerState(
        layer=draw(st.integers(0, 999)),
        tensors={Key(kinds[index], "weight"): tensor for index, tensor in enumerate(drawn)},
        scalars={"weight": ("group", 3)},
    )


@given(states())
def test_round_trip_keeps_every_bit_dtype_shape_and_scalar(state):
    manifest, buffer = pack(state)
    assert verify(manifest, buffer) is None
    back = unpack(pickle.loads(pickle.dumps(manifest)), buffer)
    assert (back.layer, back.scalars) == (state.layer, state.scalars)
    assert list(back.tensors) == list(state.tensors)
    for key, tensor in state.tensors.items():
        assert (back.tensors[key].dtype, back.tensors[key].shape) == (tensor.dtype, tensor.shape)
        assert raw(back.tensors[key]) == raw(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.25),
        torch.tensor([True, False, True]),
        torch.zeros(0),
        torch.zeros(2, 0, 3, dtype=torch.bfloat16),
        torch.arange(12, dtype=torch.bfloat16).view(3, 4).t(),
        torch.arange(9.0)[::2],
        torch.ones(1).expand(5),
        torch.nn.Parameter(torch.arange(3.0)),
    ],
    ids=["0-dim", "bool", "empty", "empty 3-dim bf16", "transposed", "strided", "expanded", "requires grad"],
)
def test_round_trip_of_unusual_tensors(tensor):
    manifest, buffer = pack(LayerState(layer=0, tensors={Key("buffer", "odd"): tensor}))
    (back,) = unpack(manifest, buffer).tensors.values()
    assert torch.equal(back, tensor)
    assert not back.requires_grad
    assert verify(manifest, buffer) is None


def test_a_layer_without_tensors_travels_too():
    manifest, buffer = pack(LayerState(layer=4, tensors={}))
    assert (manifest.total_bytes, buffer.numel(), verify(manifest, buffer)) == (0, 0, None)
    assert unpack(manifest, buffer).tensors == {}


@given(states())
def test_the_manifest_covers_every_tensor_aligned_and_without_overlap(state):
    manifest, buffer = pack(state)
    assert [entry.key for entry in manifest.entries] == list(state.tensors)
    end = 0
    for entry, tensor in zip(manifest.entries, state.tensors.values(), strict=True):
        assert entry.offset % 64 == 0
        assert entry.offset >= end
        assert entry.num_bytes == tensor.numel() * tensor.element_size()
        end = entry.offset + entry.num_bytes
    assert end <= manifest.total_bytes == buffer.numel()


@given(st.data())
def test_any_flipped_bit_is_detected(data):
    manifest, buffer = pack(small_layer(3))
    index = data.draw(st.integers(0, manifest.total_bytes - 1))
    buffer[index] ^= 1 << data.draw(st.integers(0, 7))
    assert f"layer 3: checksum differs, expected {manifest.checksum:#x}" in verify(manifest, buffer)


@given(st.integers(0, 255), st.integers(1, 200))
def test_two_bytes_in_each_others_place_are_detected(value, apart):
    buffer = torch.zeros(256, dtype=torch.uint8)
    buffer[10] = value
    swapped = torch.zeros(256, dtype=torch.uint8)
    swapped[10 + apart] = value
    assert (checksum(buffer) == checksum(swapped)) is (value == 0)


def test_a_checksum_depends_on_bytes_alone():
    _, first = pack(small_layer(1))
    _, second = pack(small_layer(1))
    assert checksum(first) == checksum(second)


def test_a_buffer_of_another_size_is_refused_with_both_sizes():
    manifest, buffer = pack(small_layer(9))
    total = manifest.total_bytes
    assert verify(manifest, buffer[:-1]) == f"layer 9: expected {total} bytes, got {total - 1}"


def test_an_entry_that_does_not_fit_its_bytes_is_refused_with_both_sizes():
    entry = Entry(key=Key("main", "bias"), dtype="float32", shape=(3,), offset=0, num_bytes=8)
    manifest = Manifest(layer=2, entries=(entry,), scalars={}, total_bytes=64, checksum=0)
    with pytest.raises(CodecError, match="main bias: expected 12 bytes, got 8"):
        unpack(manifest, torch.zeros(64, dtype=torch.uint8))


def test_packing_copies_and_unpacking_does_not():
    live = torch.arange(4.0)
    manifest, buffer = pack(LayerState(layer=0, tensors={Key("parameter", "weight"): live}))
    live.zero_()
    (view,) = unpack(manifest, buffer).tensors.values()
    assert view.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


def test_the_receiver_allocates_what_the_manifest_announces():
    manifest, sent = pack(small_layer(5))
    received = allocate(manifest, torch.device("cpu"))
    assert (received.shape, received.dtype) == (sent.shape, torch.uint8)
    received.copy_(sent)
    assert verify(manifest, received) is None
