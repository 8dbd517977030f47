"""Pruning through a job's life against a plain reference of the method; zeros that stay zeros; resuming; refusals."""

from types import SimpleNamespace

import pytest
import torch

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.family import Pruning
from megatron_dyn.dynamics.pruning.settings import PruneSettings
from megatron_dyn.dynamics.pruning.weights import MASKS
from megatron_dyn.host.support import check_dynamic
from megatron_dyn.ports import JobError
from tests.unit.dynamics.pruning.layers import arguments, pruning_on, stack

STEPS = 12
NAMES = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
SCHEDULE = {"start": 2, "end": 8, "every": 2, "initial": 0.0, "final": 0.75}
OPTIMIZERS = {
    "adam, decoupled decay": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
    "adam, coupled decay": lambda parameters: torch.optim.Adam(parameters, lr=0.01, weight_decay=0.1),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1),
}


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, generator=generator)


def loss_of(layers, x):
    for layer in layers.values():
        x = layer(x)
    return x.square().mean()


def train(layers, optimizer, family, steps):
    losses = []
    for step in steps:
        family.before_step(step)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(layers, batch(step))
        loss.backward()
        for module in layers.values():
            for parameter in module.parameters():
                parameter.main_grad = parameter.grad
        family.after_gradients(step)
        optimizer.step()
        losses.append(float(loss.detach()))
        family.at_boundary(step)
    return losses


def parameters_of(layers):
    return [parameter for module in layers.values() for parameter in module.parameters()]


def weights_of(layers):
    return {(layer, name): module.get_parameter(name) for layer, module in layers.items() for name in NAMES}


def plain_reference(layers, optimizer):
    """The method as its paper has it, on one process with everything in hand; the level as equation 1 gives it."""
    weights = weights_of(layers)
    masks = {key: torch.ones_like(weight) for key, weight in weights.items()}
    losses = []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(layers, batch(step))
        loss.backward()
        for key, weight in weights.items():
            weight.grad *= masks[key]
        optimizer.step()
        losses.append(float(loss.detach()))
        if step in (2, 4, 6, 8):
            level = 0.75 - 0.75 * (1 - (step - 2) / 6) ** 3
            magnitudes = torch.cat([weight.detach().abs().view(-1) for weight in weights.values()])
            num_kept = len(magnitudes) - round(level * len(magnitudes))
            kept = torch.zeros_like(magnitudes)
            kept[magnitudes.topk(num_kept).indices] = 1
            for (key, weight), part in zip(weights.items(), kept.split([w.numel() for w in weights.values()]), strict=True):
                masks[key] = part.view(weight.shape)
                weight.data *= masks[key]
                for moment in optimizer.state[weight].values():
                    if moment.shape == weight.shape:
                        moment *= masks[key]
    return losses


@pytest.mark.parametrize("kernels", ["dense", "csr"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_that_of_a_plain_reference(name, kernels):
    reference, layers = stack(), stack()
    expected = plain_reference(reference, OPTIMIZERS[name](parameters_of(reference)))
    before = {key: id(weight) for key, weight in weights_of(layers).items()}
    optimizer = OPTIMIZERS[name](parameters_of(layers))
    found = train(layers, optimizer, pruning_on(layers, optimizer, kernels=kernels, **SCHEDULE), range(1, STEPS + 1))
    # Another kernel adds in another order; the same products give the same bits.
    assert found == (expected if kernels == "dense" else pytest.approx(expected, rel=1e-5))
    assert {key: id(weight) for key, weight in weights_of(layers).items()} == before
    for key, weight in weights_of(layers).items():
        torch.testing.assert_close(weight, weights_of(reference)[key], rtol=0, atol=0 if kernels == "dense" else 1e-5)
    zeros = sum(int((weight == 0).sum()) for weight in weights_of(layers).values())
    assert zeros == 0.75 * sum(weight.numel() for weight in weights_of(layers).values())


def test_only_linear_layers_lose_weights_and_excluded_ones_do_not():
    layers = stack()
    optimizer = torch.optim.SGD(parameters_of(layers), lr=0.1)
    train(layers, optimizer, pruning_on(layers, optimizer, kernels="dense", exclude="linear_fc1", **SCHEDULE), range(1, 10))
    zeros = {name: int((parameter == 0).sum()) for name, parameter in layers[0].named_parameters()}
    assert [name for name, count in zeros.items() if count] == ["mlp.linear_fc2.weight"]


def test_what_is_frozen_takes_no_part():
    layers = stack()
    layers[0].requires_grad_(False)
    optimizer = torch.optim.SGD(layers[1].parameters(), lr=0.1)
    family = pruning_on(layers, optimizer, kernels="dense", **SCHEDULE)
    train(layers, optimizer, family, range(1, 10))
    assert family.notes(0)["sparsity"] == 0.0
    assert family.notes(1)["sparsity"] == 0.75


def test_changes_say_what_is_in_force_and_come_when_they_were_announced():
    layers = stack()
    optimizer = torch.optim.SGD(parameters_of(layers), lr=0.1)
    family = pruning_on(layers, optimizer, kernels="dense", scope="layer", **SCHEDULE)
    changes = {step: family.at_boundary(step) for step in range(1, 12)}
    assert tuple(step for step, found in changes.items() if found) == family.cost_changes() == (4, 6, 8)
    (last,) = changes[8]
    assert last.changes_costs
    assert (last.details["level"], last.details["num_weights"], last.details["num_kept"]) == (0.75, 512, 128)
    assert last.details["sparsity_by_layer"] == [0.75, 0.75]
    assert len(last.details["thresholds"]) == 2
    assert last.what == "level 0.7500: 128 of 512 weights stay"


def test_a_run_that_is_continued_goes_on_as_if_it_had_not_stopped():
    whole, layers = stack(), stack()
    optimizer = OPTIMIZERS["adam, decoupled decay"](parameters_of(whole))
    expected = train(whole, optimizer, pruning_on(whole, optimizer, kernels="csr", **SCHEDULE), range(1, STEPS + 1))
    optimizer = OPTIMIZERS["adam, decoupled decay"](parameters_of(layers))
    family = pruning_on(layers, optimizer, kernels="csr", **SCHEDULE)
    found = train(layers, optimizer, family, range(1, 6))
    # As a checkpoint does it: the masks with the layers, the rest from `state`.
    resumed = {layer: type(module)(8) for layer, module in layers.items()}
    args = arguments(kernels="csr", **SCHEDULE)
    again = Pruning(PruneSettings.from_args(args), args)
    for layer, module in resumed.items():
        again.attach(layer, module)
        module.load_state_dict(layers[layer].state_dict())
    second = OPTIMIZERS["adam, decoupled decay"](parameters_of(resumed))
    second.load_state_dict(optimizer.state_dict())
    again.begin(type(family._known_job)(resumed, args, second), 5, family.state())
    again.start(5)
    assert found + train(resumed, second, again, range(6, STEPS + 1)) == expected


def test_a_checkpoint_without_masks_is_complete_and_what_is_due_is_made_up_for():
    layers = stack()
    optimizer = torch.optim.SGD(parameters_of(layers), lr=0.1)
    args = arguments(kernels="dense", **SCHEDULE)
    family = Pruning(PruneSettings.from_args(args), args)
    for layer, module in layers.items():
        family.attach(layer, module)
    job = type(pruning_on(stack(), None)._known_job)(layers, args, optimizer)
    family.begin(job, 9, None)
    assert not any(module.get_submodule(MASKS).saved for module in layers.values())
    family.start(9)
    assert all(module.get_submodule(MASKS).saved for module in layers.values())
    assert family.notes(0)["sparsity"] == 0.0
    (change,) = family.at_boundary(10)
    assert change.details["level"] == 0.75


def test_another_pattern_than_the_checkpoints_is_refused():
    with pytest.raises(JobError, match="--dyn-prune-pattern: expected rows, as in the checkpoint that is loaded, got 2:4"):
        pruning_on(stack(), None, step=3, state={"level": 0.3, "pattern": "rows", "kernels": {}}, pattern="2:4")


def test_weights_that_cannot_be_cut_are_refused_by_name():
    with pytest.raises(JobError, match=r"block:3x8: layer 0: mlp.linear_fc1.weight: 16x8 cannot be cut .* --dyn-prune-exclude"):
        pruning_on(stack(), None, pattern="block:3x8")
    pruning_on(stack(), None, pattern="block:8x8", exclude="linear_fc1")
    with pytest.raises(JobError, match="--dyn-prune: expected linear layers"):
        pruning_on(stack(), None, exclude="mlp")


@pytest.mark.parametrize(
    ("options", "host", "message"),
    [
        ({"kernels": "bsr"}, {}, "bsr: expected --dyn-prune-pattern block:RxC, got unstructured"),
        ({"kernels": "semi-structured"}, {}, "expected --dyn-prune-pattern 2:4, got unstructured"),
        ({"kernels": "csr"}, {"transformer_impl": "transformer_engine"}, "expected --transformer-impl local"),
        ({"kernels": "csr"}, {"gradient_accumulation_fusion": True}, "expected --no-gradient-accumulation-fusion"),
        ({"kernels": "semi-structured", "pattern": "2:4"}, {"dyn_device": "cpu"}, "expected a GPU, got a CPU"),
    ],
)
def test_kernels_that_cannot_be_had_are_refused(options, host, message):
    args = arguments(**options)
    vars(args).update(host)
    with pytest.raises(ConfigError, match=f"--dyn-prune-kernels .*{message}"):
        Pruning(PruneSettings.from_args(args), args).check(args, [])


@pytest.mark.parametrize("kernels", ["auto", "dense"])
def test_what_picks_for_itself_goes_with_everything(kernels):
    args = arguments(kernels=kernels)
    args.transformer_impl = "transformer_engine"
    Pruning(PruneSettings.from_args(args), args).check(args, ["freeze", "moe"])


def test_fp8_is_refused_with_its_flag():
    with pytest.raises(ConfigError, match="--dyn-prune: the model cannot change while it trains with .*--fp8-format"):
        check_dynamic(SimpleNamespace(pipeline_model_parallel_size=1, optimizer="adam", fp8_format="hybrid"), ["prune"])
