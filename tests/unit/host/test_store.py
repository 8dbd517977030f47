"""Layer store: what is staged becomes the layer itself, without a copy; half a layer is refused by name."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dyn.host.optimizer import Membership, ParameterState
from megatron_dyn.host.store import MegatronLayerStore
from megatron_dyn.migrate import CodecError, Key, LayerState

LAYER = 5
MOMENTS = ("exp_avg", "exp_avg_sq")


class Scales(torch.nn.Module):
    """Keeps something that is no tensor, as modules with fp8 scales do."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


class Layer(torch.nn.Module):
    """One of everything that travels: trained, frozen, buffers that are and are not in a checkpoint, extra state."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 3), value, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.full((3,), value))
        self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("running", torch.full((), value))
        self.register_buffer("mask", torch.full((4,), value > 0), persistent=False)
        self.scales = Scales(value)


class FakeStage:
    """Stands for the StageModel of a rank that holds one layer; notes what is put in."""

    device = torch.device("cpu")

    def __init__(self):
        self.layers = {LAYER: Layer(1.0)}
        self.ddp = SimpleNamespace(parameters=lambda: iter(()))
        self.added = {}

    def build(self, layer):
        return Layer(0.0)

    def replace(self, *, removed, added):
        self.added |= added

    def release_gradients(self):
        pass


class FakeOptimizer:
    """Stands for the OptimizerEditor: bf16 parameters have an fp32 copy; notes what is put in."""

    def __init__(self):
        self.states = {}
        self.added = {}

    def export(self, parameters):
        return {parameter: self.states.setdefault(parameter, self.state(parameter)) for parameter in parameters}

    def state(self, parameter):
        value = parameter.detach().float()
        return ParameterState(
            membership=Membership(0, parameter.dim()),
            main=value + 0.5 if parameter.dtype is torch.bfloat16 else None,
            tensors={name: value + 2.0 for name in MOMENTS},
            numbers={"step": 7.0},
            group_step=9,
        )

    def edit(self, *, removed, added, order):
        self.added |= added


class Rank:
    """A store with both fakes, and the state of its layer as it would be staged elsewhere."""

    def __init__(self):
        self.stage, self.optimizer = FakeStage(), FakeOptimizer()
        self.store = MegatronLayerStore(self.stage, self.optimizer, args=None)

    def staged(self):
        """The exported layer as it arrives: other memory."""
        live = self.store.export(LAYER)
        tensors = {key: tensor.clone() for key, tensor in live.tensors.items()}
        return LayerState(layer=LAYER, tensors=tensors, scalars=live.scalars)

    def prepare(self, state):
        self.store.prepare({LAYER: state})

    def attached(self):
        """The module that is put in, and the optimizer's share by name."""
        self.store.attach([LAYER])
        module = self.stage.added[LAYER]
        return module, {name: self.optimizer.added.get(parameter) for name, parameter in module.named_parameters()}


@pytest.fixture
def rank():
    return Rank()


def is_same(actual, expected):
    """Whether two tensors are the same memory, seen the same way."""
    same_view = (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())
    return same_view and actual.data_ptr() == expected.data_ptr()


class TestExport:
    def test_it_gives_the_live_tensors_of_everything(self, rank):
        module = rank.stage.layers[LAYER]
        state = rank.store.export(LAYER)
        trained = [
            Key(kind, name) for name in ("weight", "bias") for kind in ("parameter", *map("optimizer:{}".format, MOMENTS))
        ]
        others = [Key("main", "weight"), Key("parameter", "frozen"), Key("buffer", "running"), Key("buffer", "mask")]
        assert set(state.tensors) == {*trained, *others, Key("extra", "scales._extra_state")}
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            assert is_same(state.tensors[Key(kind, name)], tensor), name
        own = rank.optimizer.states[module.weight]
        assert is_same(state.tensors[Key("main", "weight")], own.main)
        assert all(state.tensors[Key(f"optimizer:{name}", "weight")] is own.tensors[name] for name in MOMENTS)
        assert state.scalars == {
            "weight": (Membership(0, 2), {"step": 7.0}, 9),
            "bias": (Membership(0, 1), {"step": 7.0}, 9),
        }

    def test_a_layer_that_is_not_here_is_a_key_error(self, rank):
        with pytest.raises(KeyError):
            rank.store.export(LAYER + 1)


class TestWhole:
    def test_the_staged_tensors_become_the_layer_without_a_copy(self, rank):
        state = rank.staged()
        rank.prepare(state)
        module, optimizer = rank.attached()
        for name, parameter in module.named_parameters():
            assert is_same(parameter.data, state.tensors[Key("parameter", name)]), name
        for name, buffer in module.named_buffers():
            assert is_same(buffer, state.tensors[Key("buffer", name)]), name
        assert optimizer["weight"].main is state.tensors[Key("main", "weight")]
        for name in ("weight", "bias"):
            assert list(optimizer[name].tensors) == list(MOMENTS)
            assert all(optimizer[name].tensors[each] is state.tensors[Key(f"optimizer:{each}", name)] for each in MOMENTS)

    def test_what_is_no_tensor_arrives_too(self, rank):
        rank.prepare(rank.staged())
        module, optimizer = rank.attached()
        assert module.scales.scale == 1.0
        assert [parameter.requires_grad for parameter in module.parameters()] == [True, True, False]
        assert optimizer["bias"].main is None
        assert optimizer["frozen"] is None
        for name, dimensions in (("weight", 2), ("bias", 1)):
            state = optimizer[name]
            assert (state.membership, state.numbers, state.group_step) == (Membership(0, dimensions), {"step": 7.0}, 9)

    def test_what_is_attached_exports_equal(self, rank):
        state = rank.staged()
        rank.prepare(state)
        module, optimizer = rank.attached()
        rank.stage.layers[LAYER] = module
        rank.optimizer.states = {module.get_parameter(name): share for name, share in optimizer.items()}
        again = rank.store.export(LAYER)
        assert again.scalars == state.scalars
        assert set(again.tensors) == set(state.tensors)
        assert all(torch.equal(tensor, state.tensors[key]) for key, tensor in again.tensors.items())

    def test_nothing_that_was_staged_is_kept_beside_the_layer_and_the_model_is_not_touched(self, rank):
        staged = {LAYER: rank.staged()}
        rank.store.prepare(staged)
        assert staged == {}
        assert rank.stage.added == {}
        rank.store.discard()
        with pytest.raises(KeyError):
            rank.store.attach([LAYER])


TENSORS = [
    (Key("parameter", "weight"), "[2, 3] torch.bfloat16"),
    (Key("parameter", "bias"), "[3] torch.float32"),
    (Key("parameter", "frozen"), "[2] torch.float32"),
    (Key("buffer", "running"), "[] torch.float32"),
    (Key("buffer", "mask"), "[4] torch.bool"),
]
IDS = [key.name for key, _ in TENSORS]


class TestMisfit:
    def refused(self, rank, changed):
        """The message for the layer with other tensors."""
        state = rank.staged()
        with pytest.raises(CodecError) as raised:
            rank.prepare(LayerState(layer=LAYER, tensors=changed(dict(state.tensors)), scalars=state.scalars))
        return str(raised.value)

    @pytest.mark.parametrize(("key", "expected"), TENSORS, ids=IDS)
    def test_a_tensor_that_is_missing(self, rank, key, expected):
        message = self.refused(rank, lambda tensors: {other: tensors[other] for other in tensors if other != key})
        assert message == f"layer {LAYER}: {key.kind} {key.name}: expected {expected}, got nothing"

    @pytest.mark.parametrize(("key", "expected"), TENSORS, ids=IDS)
    def test_a_tensor_of_another_shape(self, rank, key, expected):
        dtype = expected.split()[-1]
        message = self.refused(rank, lambda tensors: tensors | {key: tensors[key].new_zeros(3, 2)})
        assert message == f"layer {LAYER}: {key.kind} {key.name}: expected {expected}, got [3, 2] {dtype}"

    @pytest.mark.parametrize(("key", "expected"), TENSORS, ids=IDS)
    def test_a_tensor_of_another_dtype(self, rank, key, expected):
        shape = expected.rpartition(" ")[0]
        message = self.refused(rank, lambda tensors: tensors | {key: tensors[key].to(torch.float16)})
        assert message == f"layer {LAYER}: {key.kind} {key.name}: expected {expected}, got {shape} torch.float16"

    @pytest.mark.parametrize(
        "key",
        [
            Key("parameter", "ghost"),
            Key("buffer", "ghost"),
            Key("main", "ghost"),
            Key("main", "frozen"),
            Key("optimizer:exp_avg", "frozen"),
        ],
        ids=str,
    )
    def test_a_tensor_that_the_module_has_no_place_for(self, rank, key):
        message = self.refused(rank, lambda tensors: tensors | {key: torch.zeros(2)})
        assert message.startswith(f"layer {LAYER}: state that the module has no place for: ")
        assert str(key) in message

    def test_a_layer_that_does_not_fit_leaves_nothing_to_attach(self, rank):
        self.refused(rank, lambda tensors: tensors | {Key("buffer", "ghost"): torch.zeros(1)})
        with pytest.raises(KeyError):
            rank.store.attach([LAYER])
        assert rank.stage.added == {}
