"""One layer's whole state: what arrives becomes the layer itself, without a copy; half a layer is refused by name."""

import pickle
from dataclasses import replace

import pytest
import torch

from megatron_dyn.host.layer_state import Trainable, export_layer, load_layer
from megatron_dyn.host.optimizer import Membership, ParameterState, is_expert
from megatron_dyn.migrate import CodecError, Key, LayerState

LAYER = 5
MOMENTS = ("exp_avg", "exp_avg_sq")
CPU = torch.device("cpu")


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
    """One of everything that travels: trained, an expert's, frozen, buffers that are in a checkpoint or not, extra state."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2, 3), value, dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.full((3,), value))
        self.expert = torch.nn.Parameter(torch.full((4,), value, dtype=torch.bfloat16))
        # By this Megatron knows the parameters of experts.
        self.expert.allreduce = False
        self.frozen = torch.nn.Parameter(torch.full((2,), value), requires_grad=False)
        self.register_buffer("running", torch.full((), value))
        self.register_buffer("mask", torch.full((4,), value > 0), persistent=False)
        self.scales = Scales(value)


def state_of(parameter):
    """What an optimizer would know of a parameter: bf16 parameters have an fp32 copy."""
    value = parameter.detach().float()
    return ParameterState(
        membership=Membership(0, parameter.dim()),
        main=value + 0.5 if parameter.dtype is torch.bfloat16 else None,
        tensors={name: value + 2.0 for name in MOMENTS},
        numbers={"step": 7.0},
        group_step=9,
    )


class Rank:
    """A layer with its optimizer's states, and that layer as it arrives elsewhere."""

    def __init__(self):
        self.module = Layer(1.0)
        self.states = {parameter: state_of(parameter) for parameter in self.module.parameters() if parameter.requires_grad}

    def export(self):
        return export_layer(LAYER, self.module, self.states, CPU)

    def staged(self, *, sharded=False):
        """Other memory, and the rest pickled."""
        live = export_layer(LAYER, self.module, None if sharded else self.states, CPU)
        tensors = {key: tensor.clone() for key, tensor in live.tensors.items()}
        return LayerState(layer=LAYER, tensors=tensors, scalars=pickle.loads(pickle.dumps(live.scalars)))


def loaded(state):
    """A fresh module with that state, and the optimizer's share by name."""
    module = Layer(0.0)
    optimizer = load_layer(module, state)
    return module, {name: optimizer.get(parameter) for name, parameter in module.named_parameters()}


@pytest.fixture
def rank():
    return Rank()


def is_same(actual, expected):
    """Whether two tensors are the same memory, seen the same way."""
    same_view = (actual.shape, actual.dtype, actual.stride()) == (expected.shape, expected.dtype, expected.stride())
    return same_view and actual.data_ptr() == expected.data_ptr()


def trainable(dimensions, *, expert=False):
    return Trainable(expert=expert, membership=Membership(0, dimensions), numbers={"step": 7.0}, group_step=9)


class TestExport:
    def test_it_gives_the_live_tensors_of_everything(self, rank):
        state = rank.export()
        trained = [
            Key(kind, name)
            for name in ("weight", "bias", "expert")
            for kind in ("parameter", *map("optimizer:{}".format, MOMENTS))
        ]
        mains = [Key("main", "weight"), Key("main", "expert")]
        others = [Key("parameter", "frozen"), Key("buffer", "running"), Key("buffer", "mask")]
        assert set(state.tensors) == {*trained, *mains, *others, Key("extra", "scales._extra_state")}
        for name, tensor in [*rank.module.named_parameters(), *rank.module.named_buffers()]:
            kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer"
            assert is_same(state.tensors[Key(kind, name)], tensor), name
        own = rank.states[rank.module.weight]
        assert is_same(state.tensors[Key("main", "weight")], own.main)
        assert all(state.tensors[Key(f"optimizer:{name}", "weight")] is own.tensors[name] for name in MOMENTS)
        assert state.scalars == {"weight": trainable(2), "bias": trainable(1), "expert": trainable(1, expert=True)}
        assert state.layer == LAYER

    def test_where_the_optimizer_is_sharded_only_the_layer_itself_is_given(self, rank):
        state = export_layer(LAYER, rank.module, None, CPU)
        assert {key.kind for key in state.tensors} == {"parameter", "buffer", "extra"}
        assert state.scalars == {
            "weight": Trainable(expert=False),
            "bias": Trainable(expert=False),
            "expert": Trainable(expert=True),
        }

    def test_a_parameter_without_a_state_is_a_key_error(self, rank):
        del rank.states[rank.module.bias]
        with pytest.raises(KeyError):
            rank.export()

    def test_experts_are_known_by_megatrons_mark(self, rank):
        assert [is_expert(parameter) for parameter in rank.module.parameters()] == [False, False, True, False]
        rank.module.bias.allreduce = True
        assert not is_expert(rank.module.bias)


class TestWhole:
    def test_the_staged_tensors_become_the_layer_without_a_copy(self, rank):
        state = rank.staged()
        module, optimizer = loaded(state)
        for name, parameter in module.named_parameters():
            assert is_same(parameter.data, state.tensors[Key("parameter", name)]), name
        for name, buffer in module.named_buffers():
            assert is_same(buffer, state.tensors[Key("buffer", name)]), name
        assert optimizer["weight"].main is state.tensors[Key("main", "weight")]
        for name in ("weight", "bias", "expert"):
            assert list(optimizer[name].tensors) == list(MOMENTS)
            assert all(optimizer[name].tensors[each] is state.tensors[Key(f"optimizer:{each}", name)] for each in MOMENTS)

    def test_what_is_no_tensor_arrives_too(self, rank):
        module, optimizer = loaded(rank.staged())
        assert module.scales.scale == 1.0
        assert [parameter.requires_grad for parameter in module.parameters()] == [True, True, True, False]
        assert optimizer["bias"].main is None
        assert optimizer["frozen"] is None
        for name, dimensions in (("weight", 2), ("bias", 1), ("expert", 1)):
            state = optimizer[name]
            assert (state.membership, state.numbers, state.group_step) == (Membership(0, dimensions), {"step": 7.0}, 9)

    def test_a_parameter_that_was_frozen_or_thawed_since_the_module_was_built_is_so_here(self, rank):
        rank.module.bias.requires_grad_(False)
        module, optimizer = loaded(rank.staged())
        assert not module.bias.requires_grad
        assert optimizer["bias"] is None

    @pytest.mark.parametrize("sharded", [False, True])
    def test_what_was_loaded_exports_equal(self, rank, sharded):
        state = rank.staged(sharded=sharded)
        module, optimizer = loaded(state)
        states = {module.get_parameter(name): share for name, share in optimizer.items()}
        again = export_layer(LAYER, module, None if sharded else states, CPU)
        assert again.scalars == state.scalars
        assert set(again.tensors) == set(state.tensors)
        assert all(torch.equal(tensor, state.tensors[key]) for key, tensor in again.tensors.items())

    def test_where_the_optimizer_is_sharded_it_has_no_share(self, rank):
        module = Layer(0.0)
        assert load_layer(module, rank.staged(sharded=True)) == {}
        assert [parameter.requires_grad for parameter in module.parameters()] == [True, True, True, False]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_a_buffer_may_be_of_another_dtype_and_keeps_it(self, rank, dtype):
        # Megatron converts some buffers to fp32 only as it trains; a layer just built has them in the model's precision.
        state, key = rank.staged(), Key("buffer", "running")
        state = replace(state, tensors={**state.tensors, key: torch.tensor(3.25, dtype=dtype)})
        module, _ = loaded(state)
        assert is_same(module.running, state.tensors[key])
        assert module.running.dtype is dtype


TENSORS = [
    (Key("parameter", "weight"), "[2, 3] torch.bfloat16"),
    (Key("parameter", "bias"), "[3] torch.float32"),
    (Key("parameter", "expert"), "[4] torch.bfloat16"),
    (Key("parameter", "frozen"), "[2] torch.float32"),
    (Key("buffer", "running"), "[] torch.float32"),
    (Key("buffer", "mask"), "[4] torch.bool"),
]
IDS = [key.name for key, _ in TENSORS]


class TestMisfit:
    def refused(self, rank, changed, *, sharded=False):
        """The message for the layer with other tensors."""
        state = rank.staged(sharded=sharded)
        with pytest.raises(CodecError) as raised:
            loaded(LayerState(layer=LAYER, tensors=changed(dict(state.tensors)), scalars=state.scalars))
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

    @pytest.mark.parametrize(("key", "expected"), TENSORS[:4], ids=IDS[:4])
    def test_a_parameter_of_another_dtype(self, rank, key, expected):
        shape = expected.rpartition(" ")[0]
        message = self.refused(rank, lambda tensors: tensors | {key: tensors[key].to(torch.float16)})
        assert message == f"layer {LAYER}: {key.kind} {key.name}: expected {expected}, got {shape} torch.float16"

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            (lambda tensors: tensors.pop(Key("main", "weight")), "main weight of a torch.bfloat16 parameter: got nothing"),
            (
                lambda tensors: tensors.update({Key("main", "weight"): torch.zeros(3, 2)}),
                "main weight of a torch.bfloat16 parameter: got [3, 2]",
            ),
            (
                lambda tensors: tensors.update({Key("main", "bias"): torch.zeros(3)}),
                "main bias of a torch.float32 parameter: got [3]",
            ),
        ],
        ids=["missing", "of another shape", "of an fp32 parameter"],
    )
    def test_an_fp32_copy_that_is_not_as_the_parameter_needs_it(self, rank, changed, told):
        def apply(tensors):
            changed(tensors)
            return tensors

        assert self.refused(rank, apply) == f"layer {LAYER}: {told}"

    @pytest.mark.parametrize("there", [False, True])
    def test_an_expert_on_one_side_alone(self, rank, there):
        name = "weight" if there else "expert"
        rank.module.get_parameter(name).allreduce = not there
        message = self.refused(rank, lambda tensors: tensors)
        assert message == f"layer {LAYER}: parameter {name}: expert {there} there, {not there} here"

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

    def test_moments_of_a_parameter_whose_optimizer_is_sharded(self, rank):
        key = Key("optimizer:exp_avg", "bias")
        message = self.refused(rank, lambda tensors: tensors | {key: torch.zeros(3)}, sharded=True)
        assert message == f"layer {LAYER}: state that the module has no place for: {[str(key)]}"

    def test_extra_state_that_the_module_has_no_place_for(self, rank):
        message = self.refused(rank, lambda tensors: tensors | {Key("extra", "ghost._extra_state"): torch.zeros(1)})
        assert message == f"layer {LAYER}: extra state that the module has no place for: ['ghost._extra_state']"
