"""Small modules that stand for decoder layers, and a job of one rank around them whose moments are cleared as well."""

from types import SimpleNamespace

import torch

from megatron_dyn.dynamics.pruning.family import Pruning
from megatron_dyn.dynamics.pruning.linear import PrunableLinear
from megatron_dyn.dynamics.pruning.settings import PruneSettings
from megatron_dyn.testing.dynamics import FakeJob


class ToyLinear(torch.nn.Linear):
    """With the method that Megatron's linear layers have."""

    def forward(self, x):
        options = {"gradient_accumulation_fusion": False, "allreduce_dgrad": False, "sequence_parallel": False}
        return self._forward_impl(input=x, weight=self.weight, bias=self.bias, **options)

    def _forward_impl(self, input, weight, *args, **options):
        return torch.nn.functional.linear(input, weight, options["bias"])


class PrunableToyLinear(PrunableLinear, ToyLinear):
    """As the family's layer_spec would have it."""


class ToyLayer(torch.nn.Module):
    """A decoder layer as far as names go: two linear layers, a norm, and a router that must stay dense."""

    def __init__(self, width=8):
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.router = torch.nn.Linear(width, width, bias=False)
        self.mlp = torch.nn.Module()
        self.mlp.linear_fc1 = PrunableToyLinear(width, 2 * width)
        self.mlp.linear_fc2 = PrunableToyLinear(2 * width, width)

    def forward(self, x):
        x = self.norm(x)
        return x + self.mlp.linear_fc2(torch.nn.functional.gelu(self.mlp.linear_fc1(x))) * torch.sigmoid(self.router(x))


class OptimizedJob(FakeJob):
    """A job whose torch optimizer holds moments."""

    def __init__(self, layers, args, optimizer=None):
        super().__init__(layers, args=args)
        self.optimizer = optimizer

    def silence(self, masks):
        super().silence(masks)
        for parameter, mask in masks.items():
            for value in self.optimizer.state.get(parameter, {}).values():
                if value.shape == parameter.shape:
                    value.mul_(mask)


def arguments(**options):
    """Megatron's arguments as far as pruning asks for them."""
    given = {f"dyn_prune_{name}": value for name, value in options.items()}
    return SimpleNamespace(
        train_iters=12,
        global_batch_size=4,
        micro_batch_size=2,
        data_parallel_size=1,
        seq_length=3,
        context_parallel_size=1,
        num_layers=2,
        transformer_impl="local",
        gradient_accumulation_fusion=False,
        **given,
    )


def stack(width=8, seed=0):
    """Two layers by global id, the same every time."""
    torch.manual_seed(seed)
    return {layer: ToyLayer(width) for layer in range(2)}


def pruning_on(layers, optimizer, *, step=0, state=None, **options):
    """A started family on these layers."""
    args = arguments(**options)
    family = Pruning(PruneSettings.from_args(args), args)
    for layer, module in layers.items():
        family.attach(layer, module)
    family.begin(OptimizedJob(layers, args, optimizer), step, state)
    family.start(step)
    return family
