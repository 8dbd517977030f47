"""Codec: a layer's whole state there and back, bit by bit and without a copy; a digest that notices every damage."""

import math
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_dyn.migrate import Entry, Key, LayerState, allocate, codec, describe, digest, flat_bytes
from megatron_dyn.testing.fakes import small_layer

CPU = torch.device("cpu")
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


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def state_of(*tensors, layer=0):
    return LayerState(layer=layer, tensors={Key("buffer", str(index)): tensor for index, tensor in enumerate(tensors)})


def travel(state):
    """What arrives: the manifest pickled, as between ranks, room made by it, and every buffer filled from its peer."""
    received = allocate(pickle.loads(pickle.dumps(describe(state))), CPU)
    for target, source in zip(flat_bytes(received), flat_bytes(state), strict=True):
        target.copy_(source)
    return received


def host_digest(state):
    """`digest` of a whole layer."""
    return digest(flat_bytes(state))


def device_digest(state):
    """`digest` as on a GPU."""
    value = 0
    for buffer in flat_bytes(state):
        value = codec._device_digest(buffer, value)
    return value


@pytest.fixture(scope="module", params=[host_digest, device_digest], ids=["cpu", "gpu arithmetic"])
def digest_of(request):
    return request.param


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


class TestRoundTrip:
    @given(states())
    def test_it_keeps_every_bit_dtype_shape_and_scalar(self, state):
        back = travel(state)
        assert (back.layer, back.scalars) == (state.layer, state.scalars)
        assert list(back.tensors) == list(state.tensors)
        for key, tensor in state.tensors.items():
            assert (back.tensors[key].dtype, back.tensors[key].shape) == (tensor.dtype, tensor.shape)
            assert raw(back.tensors[key]) == raw(tensor)
        assert host_digest(back) == host_digest(state)
        assert device_digest(back) == device_digest(state)

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
    def test_of_unusual_tensors(self, tensor):
        state = state_of(tensor)
        back = travel(state)
        (arrived,) = back.tensors.values()
        assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(arrived, tensor)
        assert not arrived.requires_grad
        assert host_digest(back) == host_digest(state)

    @pytest.mark.parametrize("state", [LayerState(layer=4, tensors={}), state_of(torch.zeros(0), torch.zeros(2, 0), layer=4)])
    def test_a_layer_without_a_byte_travels_too(self, state):
        back = travel(state)
        assert (back.layer, list(back.tensors)) == (4, list(state.tensors))
        assert (describe(state).num_bytes, flat_bytes(state), host_digest(back)) == (0, [], host_digest(state))


class TestManifest:
    @given(states())
    def test_it_covers_every_tensor_in_order_and_every_byte(self, state):
        manifest = describe(state)
        assert [entry.key for entry in manifest.entries] == list(state.tensors)
        for entry, tensor in zip(manifest.entries, state.tensors.values(), strict=True):
            assert (getattr(torch, entry.dtype), entry.shape) == (tensor.dtype, tuple(tensor.shape))
            assert entry.num_bytes == tensor.numel() * tensor.element_size() == len(raw(tensor))
        assert manifest.num_bytes == sum(buffer.numel() for buffer in flat_bytes(state))
        assert (manifest.layer, manifest.scalars) == (state.layer, state.scalars)

    def test_it_is_plain_and_small(self):
        state = LayerState(layer=2, tensors={Key("main", "bias"): torch.zeros(3, 1 << 16)}, scalars={"bias": 1})
        manifest = describe(state)
        assert manifest.entries == (Entry(key=Key("main", "bias"), dtype="float32", shape=(3, 1 << 16)),)
        assert pickle.loads(pickle.dumps(manifest)) == manifest
        assert len(pickle.dumps(manifest)) < 1000

    def test_it_reads_no_tensor_data(self):
        assert describe(state_of(torch.empty(5, dtype=torch.bfloat16, device="meta"))).num_bytes == 10

    def test_it_does_not_follow_later_changes_of_the_scalars(self):
        scalars = {"step": 1}
        manifest = describe(LayerState(layer=0, tensors={}, scalars=scalars))
        scalars["step"] = 2
        assert manifest.scalars == {"step": 1}

    @given(states())
    def test_what_is_allocated_by_it_has_the_same_manifest(self, state):
        manifest = describe(state)
        received = allocate(manifest, CPU)
        assert describe(received) == manifest
        assert all(tensor.is_contiguous() and tensor.device == CPU for tensor in received.tensors.values())

    def test_room_is_made_on_the_device_that_is_named(self):
        received = allocate(describe(small_layer(5)), torch.device("meta"))
        assert {tensor.device.type for tensor in received.tensors.values()} == {"meta"}


class TestFlatBytes:
    @given(states())
    def test_they_hold_the_bytes_of_all_tensors_in_order_without_the_empty_ones(self, state):
        buffers = flat_bytes(state)
        assert [buffer.tolist() for buffer in buffers] == [raw(tensor) for tensor in state.tensors.values() if tensor.numel()]
        assert all((buffer.dtype, buffer.dim(), buffer.is_contiguous()) == (torch.uint8, 1, True) for buffer in buffers)

    @given(states())
    def test_they_share_memory_with_every_tensor_that_is_contiguous(self, state):
        filled = [tensor for tensor in state.tensors.values() if tensor.numel()]
        shared = [storage_of(buffer) == storage_of(tensor) for buffer, tensor in zip(flat_bytes(state), filled, strict=True)]
        assert shared == [tensor.is_contiguous() for tensor in filled]

    def test_writing_into_them_writes_into_the_state(self):
        state = allocate(describe(small_layer(1)), CPU)
        for buffer in flat_bytes(state):
            buffer.zero_()
        assert all(not tensor.any() for tensor in state.tensors.values())

    def test_a_part_of_a_larger_tensor_is_that_part_and_shares_its_memory(self):
        whole = torch.arange(8, dtype=torch.int16)
        (buffer,) = flat_bytes(state_of(whole[3:5]))
        assert buffer.data_ptr() == whole[3:].data_ptr()
        assert buffer.tolist() == raw(whole)[6:10]

    def test_a_parameter_is_shared_without_its_gradient(self):
        parameter = torch.nn.Parameter(torch.arange(3.0))
        (buffer,) = flat_bytes(state_of(parameter))
        assert buffer.data_ptr() == parameter.data_ptr()
        assert not buffer.requires_grad


class TestDigest:
    @given(data=st.data())
    def test_any_changed_byte_of_any_tensor_is_noticed(self, digest_of, data):
        state = travel(data.draw(states()))
        buffers = flat_bytes(state)
        assume(buffers)
        before = digest_of(state)
        buffer = data.draw(st.sampled_from(buffers))
        buffer[data.draw(st.integers(0, buffer.numel() - 1))] ^= data.draw(st.integers(1, 255))
        assert digest_of(state) != before

    @given(value=st.integers(0, 255), apart=st.integers(1, 200))
    def test_two_bytes_in_each_others_place_are_noticed(self, digest_of, value, apart):
        one, other = torch.zeros(2, 256, dtype=torch.uint8)
        one[10] = other[10 + apart] = value
        assert (digest_of(state_of(one)) == digest_of(state_of(other))) is (value == 0)

    def test_two_tensors_in_each_others_place_are_noticed(self, digest_of):
        one, other = torch.arange(4.0), torch.arange(4.0) + 1
        assert digest_of(state_of(one, other)) != digest_of(state_of(other, one))

    def test_it_depends_on_bytes_alone(self, digest_of):
        square = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
        assert digest_of(small_layer(1)) == digest_of(small_layer(1)) != digest_of(small_layer(2))
        assert digest_of(state_of(square.t())) == digest_of(state_of(square.t().contiguous()))
        assert digest_of(state_of(square.t())) != digest_of(state_of(square))
        assert digest_of(small_layer(1)) == digest_of(replace(small_layer(1), layer=9, scalars={}))

    def test_it_leaves_the_state_as_it_is(self, digest_of):
        state = small_layer(6)
        digest_of(state)
        assert all(torch.equal(tensor, small_layer(6).tensors[key]) for key, tensor in state.tensors.items())

    @given(chunk_bytes=st.integers(1, 50))
    def test_on_a_gpu_it_does_not_depend_on_the_size_of_the_chunks(self, chunk_bytes):
        expected = device_digest(small_layer(3))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_CHUNK_BYTES", chunk_bytes)
            assert device_digest(small_layer(3)) == expected

    def test_it_can_be_told_to_all_ranks_and_printed(self, digest_of):
        value = digest_of(small_layer(3))
        assert type(value) is int
        assert 0 <= value < 1 << 64
