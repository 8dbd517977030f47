"""The optimizer edited in place: what moved trains on as if it never had, and Megatron's lists stay in order."""

import gc
import pickle
import weakref
from dataclasses import replace

import pytest
import torch
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron_dyn.host.optimizer import ListEditor, Membership, ParameterState, ScalarTensor

TORCH_OPTIMIZERS = {
    "adam": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "sgd with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
}
KINDS = [(kind, half) for kind in TORCH_OPTIMIZERS for half in (False, True)]
WEIGHTS, BIASES = 0, 1

pytestmark = pytest.mark.usefixtures("cpu_platform")


class Layer(torch.nn.Module):
    """Two parameters in the model's precision, and one that stays fp32 in any."""

    def __init__(self, layer, half):
        super().__init__()
        ramp = torch.arange(12.0).view(3, 4) / 10 + layer
        dtype = torch.bfloat16 if half else torch.float32
        self.weight = torch.nn.Parameter(ramp.to(dtype))
        self.bias = torch.nn.Parameter(ramp[0].to(dtype))
        self.scale = torch.nn.Parameter(ramp[0, :1])


class Stage:
    """Layers and the Megatron optimizer around them: weights decay, the rest does not."""

    def __init__(self, layers, kind="adam", half=False):
        self.half = half
        self.layers = {layer: Layer(layer, half) for layer in layers}
        everything = [pair for module in self.layers.values() for pair in module.named_parameters()]
        groups = [
            {"params": [parameter for name, parameter in everything if name == "weight"], "weight_decay": 0.1},
            {"params": [parameter for name, parameter in everything if name != "weight"], "weight_decay": 0.0},
        ]
        wrapper = Float16OptimizerWithFloat16Params if half else FP32Optimizer
        config = OptimizerConfig(optimizer="adam", lr=0.1, clip_grad=0.0, bf16=half)
        options = (None, lambda *_: None) if half else (lambda *_: None,)
        self.optimizer = wrapper(TORCH_OPTIMIZERS[kind](groups), config, *options)
        self.editor = ListEditor([self.optimizer])

    def parameters(self):
        return [parameter for _, module in sorted(self.layers.items()) for parameter in module.parameters()]

    def name_of(self, tensor):
        """`layer.name` of a parameter or of its fp32 copy."""
        for layer, module in self.layers.items():
            for name, parameter in module.named_parameters():
                if tensor is parameter or tensor is getattr(parameter, "main_param", None):
                    return f"{layer}.{name}"
        raise AssertionError("the optimizer holds a tensor that is no parameter of the stage")

    def lists(self):
        """Every list of the optimizer, by names."""
        groups = [group["params"] for group in self.optimizer.optimizer.param_groups]
        if self.half:
            groups += self.optimizer.float16_groups
            groups += self.optimizer.fp32_from_float16_groups
            groups += self.optimizer.fp32_from_fp32_groups
        return [[self.name_of(tensor) for tensor in group] for group in groups]

    def step(self, step):
        """One update by gradients that depend on step, layer and parameter alone."""
        for layer, module in self.layers.items():
            for parameter in module.parameters():
                angle = torch.arange(parameter.numel(), dtype=torch.float32).view(parameter.shape) * (layer + 1) + step
                parameter.main_grad = torch.sin(angle)
        self.optimizer.step()

    def state(self):
        """All that training depends on, as plain numbers by layer and parameter."""
        found, states = {}, self.editor.export(self.parameters())
        for layer, module in self.layers.items():
            for name, parameter in module.named_parameters():
                state = states[parameter]
                main = None if state.main is None else state.main.tolist()
                moments = {key: value.tolist() for key, value in state.tensors.items()}
                found[layer, name] = (parameter.tolist(), state.membership, main, moments, dict(state.numbers))
        return found


def state_of(stage, parameter):
    (state,) = stage.editor.export([parameter]).values()
    return state


def travel(state):
    """A state as it arrives on another rank: tensors copied, the rest pickled."""
    numbers, membership = pickle.loads(pickle.dumps((dict(state.numbers), state.membership)))
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    main = None if state.main is None else state.main.detach().clone()
    return replace(state, membership=membership, main=main, tensors=tensors, numbers=numbers)


def move(layer, source, destination):
    """Take a layer with its state from one stage to the other, as the store does."""
    old, new = source.layers[layer], Layer(layer, source.half)
    new.load_state_dict(old.state_dict())
    states = source.editor.export(old.parameters())
    added = {parameter: travel(states[getattr(old, name)]) for name, parameter in new.named_parameters()}
    del source.layers[layer]
    source.editor.edit(removed=list(old.parameters()), added={}, order=source.parameters())
    destination.layers[layer] = new
    destination.editor.edit(removed=[], added=added, order=destination.parameters())


@pytest.mark.parametrize(("kind", "half"), KINDS)
def test_training_goes_on_in_every_bit_as_if_nothing_had_moved(kind, half):
    unmoved = Stage(range(4), kind, half)
    first, second = Stage([0, 1], kind, half), Stage([2, 3], kind, half)
    itinerary = {2: (1, first, second), 4: (2, second, first), 5: (0, first, second)}
    for step in range(8):
        if step in itinerary:
            move(*itinerary[step])
        for stage in (unmoved, first, second):
            stage.step(step)
    assert first.state() | second.state() == unmoved.state()
    assert (sorted(first.layers), sorted(second.layers)) == ([2], [0, 1, 3])


@pytest.mark.parametrize(("kind", "half"), KINDS)
def test_a_move_before_the_first_step_moves_no_state(kind, half):
    unmoved, first, second = Stage(range(3), kind, half), Stage([0, 1], kind, half), Stage([2], kind, half)
    move(1, first, second)
    assert second.optimizer.optimizer.state == {}
    for stage in (unmoved, first, second):
        stage.step(0)
    assert first.state() | second.state() == unmoved.state()


@pytest.mark.parametrize("half", [False, True])
def test_the_lists_are_those_of_a_stage_built_that_way(half):
    first, second = Stage([0, 1], half=half), Stage([2, 3], half=half)
    move(1, first, second)
    assert first.lists() == Stage([0], half=half).lists()
    assert second.lists() == Stage([1, 2, 3], half=half).lists()
    assert second.lists()[WEIGHTS] == ["1.weight", "2.weight", "3.weight"]
    assert second.lists()[BIASES] == [f"{layer}.{name}" for layer in (1, 2, 3) for name in ("bias", "scale")]


@pytest.mark.parametrize("half", [False, True])
def test_a_stage_that_lost_all_its_layers_steps_and_takes_layers_again(half):
    unmoved, first, second = Stage(range(2), half=half), Stage([0], half=half), Stage([1], half=half)
    for step in range(4):
        if step == 1:
            move(0, first, second)
        if step == 3:
            move(0, second, first)
        for stage in (unmoved, first, second):
            stage.step(step)
    assert first.state() | second.state() == unmoved.state()


@pytest.mark.parametrize("half", [False, True])
def test_parameters_that_stay_keep_their_very_tensors(half):
    first, second = Stage([0, 1], half=half), Stage([2], half=half)
    first.step(0)
    second.step(0)

    def identities():
        states = first.editor.export(first.layers[0].parameters()).values()
        return [(id(state.main), {name: id(tensor) for name, tensor in state.tensors.items()}) for state in states]

    before = identities()
    move(1, first, second)
    assert identities() == before


@pytest.mark.parametrize("half", [False, True])
def test_nothing_of_a_layer_that_left_is_kept(half):
    first, second = Stage([0, 1], half=half), Stage([2], half=half)
    first.step(0)
    weight = first.layers[1].weight
    gone = [weakref.ref(weight), weakref.ref(state_of(first, weight).main if half else weight)]
    del weight
    move(1, first, second)
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert len(first.optimizer.optimizer.state) == 3


@pytest.mark.parametrize("half", [False, True])
def test_states_come_by_parameter_for_those_asked_for_alone_and_live(half):
    stage = Stage([0, 1], half=half)
    stage.step(0)
    asked = [stage.layers[1].scale, stage.layers[0].weight]
    states = stage.editor.export(parameter for parameter in asked)
    assert list(states) == asked
    assert [state.membership for state in states.values()] == [Membership(0, BIASES), Membership(0, WEIGHTS)]
    before = [state.tensors["exp_avg"].clone() for state in states.values()]
    stage.step(1)
    assert not any(torch.equal(state.tensors["exp_avg"], old) for state, old in zip(states.values(), before, strict=True))
    assert stage.editor.export([]) == {}


@pytest.mark.parametrize("half", [False, True])
def test_an_order_that_lacks_a_member_is_refused_with_both_numbers(half):
    stage = Stage([0, 1], half=half)
    with pytest.raises(ValueError, match=r"optimizer: expected 6 parameters in the model's order, got 5"):
        stage.editor.edit(removed=[], added={}, order=stage.parameters()[1:])


def test_an_order_may_name_parameters_that_are_not_optimised():
    stage, frozen = Stage([0]), torch.nn.Parameter(torch.zeros(2))
    before = stage.lists()
    stage.editor.edit(removed=[], added={}, order=[frozen, *stage.parameters()])
    assert stage.lists() == before


def test_a_parameter_the_optimizer_does_not_know_is_refused():
    stage, stranger = Stage([0]), torch.nn.Parameter(torch.zeros(2))
    with pytest.raises(KeyError):
        stage.editor.export([*stage.parameters(), stranger])
    with pytest.raises(KeyError):
        stage.editor.edit(removed=[stranger], added={}, order=stage.parameters())


def test_the_fp32_copy_that_arrives_is_known_to_megatron_as_its_own_would_be():
    first, second = Stage([0, 1], half=True), Stage([2], half=True)
    move(1, first, second)
    parameter = second.layers[1].weight
    main = state_of(second, parameter).main
    assert parameter.main_param is main
    assert main.dtype is torch.float32
    assert state_of(second, second.layers[1].scale).main is None


def test_attributes_by_which_megatron_sorts_parameters_reach_the_fp32_copy():
    stage, parameter = Stage([0], half=True), Layer(1, half=True).weight
    parameter.tensor_model_parallel, parameter.shared = True, True
    state = ParameterState(membership=Membership(0, WEIGHTS), main=torch.zeros(3, 4))
    stage.editor.edit(removed=[], added={parameter: state}, order=[*stage.parameters(), parameter])
    main = state_of(stage, parameter).main
    assert (main.tensor_model_parallel, main.shared) == (True, True)


class TestGroupStep:
    """Fused Adam counts steps per group, and skips empty groups without counting."""

    def moved(self, destination_layers, count, *, arriving=7):
        """Counts of a stage that layer 1 came to; None: the stage keeps no count per group."""
        first, second = Stage([0, 1]), Stage(destination_layers)
        for stage, steps in ((first, arriving), (second, count)):
            for group in stage.optimizer.optimizer.param_groups if steps else ():
                group["step"] = steps
        move(1, first, second)
        return [group.get("step") for group in second.optimizer.optimizer.param_groups]

    @pytest.mark.parametrize("count", [None, 3])
    def test_an_empty_group_takes_over_the_count_of_the_first_to_arrive(self, count):
        assert self.moved([], count) == [7, 7]

    def test_a_group_that_is_in_use_has_its_count(self):
        assert self.moved([2], 7) == [7, 7]

    @pytest.mark.parametrize(("count", "arriving"), [(3, 7), (None, 7), (7, None)])
    def test_another_count_than_that_of_a_group_in_use_is_refused_with_both(self, count, arriving):
        with pytest.raises(ValueError, match=f"optimizer group step: expected {count}, a layer arrived with {arriving}"):
            self.moved([2], count, arriving=arriving)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16])
def test_a_scalar_tensor_travels_as_a_number_and_comes_back_exactly(dtype):
    stage = Stage([0])
    stage.step(0)
    weight = stage.layers[0].weight
    step = torch.tensor(41, dtype=dtype)
    stage.optimizer.optimizer.state[weight]["step"] = step
    numbers = travel(state_of(stage, weight)).numbers
    assert numbers["step"] == ScalarTensor(41, str(dtype).removeprefix("torch."), "cpu")
    back = numbers["step"].materialise(weight)
    assert torch.equal(back, step)
    assert back.dtype is dtype


def test_optimizers_in_a_chain_keep_their_parameters_apart():
    first, second = Stage([0]), Stage([1])
    editor = ListEditor([first.optimizer, second.optimizer])
    weights = (first.layers[0].weight, second.layers[1].weight)
    states = editor.export(weights)
    assert [states[weight].membership for weight in weights] == [Membership(0, WEIGHTS), Membership(1, WEIGHTS)]
    newcomer = Layer(5, half=False)
    added = {newcomer.bias: ParameterState(membership=Membership(1, BIASES), main=None)}
    order = [newcomer.bias, *second.parameters(), *first.parameters()]
    editor.edit(removed=[weights[0]], added=added, order=order)
    groups = [group["params"] for stage in (first, second) for group in stage.optimizer.optimizer.param_groups]
    assert [len(group) for group in groups] == [0, 2, 1, 3]
    assert groups[3][0] is newcomer.bias
