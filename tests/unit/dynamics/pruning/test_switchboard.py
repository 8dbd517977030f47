"""Which kernel sits where: agreed from the times of all ranks, kept over moves, dropped when masks change."""

import torch

from megatron_dyn.dynamics.pruning.kernels import Product
from megatron_dyn.dynamics.pruning.pattern import Pattern
from megatron_dyn.dynamics.pruning.settings import KernelChoice
from megatron_dyn.dynamics.pruning.switchboard import Switchboard
from megatron_dyn.dynamics.pruning.weights import Weight
from tests.unit.dynamics.pruning.layers import ToyLayer

NAME = "mlp.linear_fc1.weight"
PATTERN = Pattern.parse("unstructured")


class Watch:
    """A stopwatch that shows what it was set to."""

    def __init__(self, **seconds):
        self.seconds, self.asked = seconds, []

    def times(self, weight, mask, num_tokens):
        self.asked.append(num_tokens)
        return dict.fromkeys(Product, self.seconds)


def placed(module, layer=3):
    parameter = module.get_parameter(NAME)
    mask = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(0)) < 0.2
    parameter.data.mul_(mask)
    return [(module, Weight(layer, NAME, parameter, mask), 6)]


def alone(value, what):
    return [value]


def test_the_fastest_is_put_in_and_told():
    module = ToyLayer()
    board, weights = Switchboard(KernelChoice.AUTO, PATTERN, Watch(dense=1.0, csr=0.5)), placed(module)
    board.choose(weights, alone)
    board.install(weights)
    expected = {product.value: "csr" for product in Product}
    assert board.chosen == {(3, NAME): expected}
    assert board.in_use(module, [weights[0][1]]) == {NAME: expected}


def test_all_ranks_choose_the_same_whatever_they_measured():
    module = ToyLayer()
    board, weights = Switchboard(KernelChoice.AUTO, PATTERN, Watch(dense=1.0, csr=0.5)), placed(module)
    slower = {(3, NAME): dict.fromkeys(Product, {"dense": 1.0, "csr": 5.0})}
    elsewhere = {(9, NAME): dict.fromkeys(Product, {"dense": 1.0, "csr": 0.1})}
    board.choose(weights, lambda value, what: [value, slower, slower, elsewhere])
    board.install(weights)
    assert board.chosen.keys() == {(9, NAME)}
    assert board.in_use(module, [weights[0][1]]) == {}


def test_what_was_chosen_follows_a_layer_that_arrives():
    there, here = ToyLayer(), ToyLayer()
    board = Switchboard(KernelChoice.AUTO, PATTERN, Watch(dense=1.0, csr=0.5))
    board.choose(placed(there), alone)
    arrived = placed(here)
    board.install(arrived)
    assert board.in_use(here, [arrived[0][1]])
    first = here.mlp.linear_fc1.sparse
    board.install(arrived)
    assert here.mlp.linear_fc1.sparse is first


def test_a_new_choice_drops_what_was_made_for_the_old_masks():
    module = ToyLayer()
    board, weights = Switchboard(KernelChoice.CSR, PATTERN, Watch()), placed(module)
    board.install(weights)
    old = module.mlp.linear_fc1.sparse
    board.choose(weights, alone)
    assert module.mlp.linear_fc1.sparse is None
    board.install(weights)
    assert module.mlp.linear_fc1.sparse is not old
    # Forced kernels follow from the flags: nothing has to be remembered.
    assert board.chosen == {}


def test_values_expire_where_kernels_are():
    module = ToyLayer()
    board, weights = Switchboard(KernelChoice.CSR, PATTERN, Watch()), placed(module)
    board.expire(weights)
    board.install(weights)
    x = torch.ones(1, 8)
    module.mlp.linear_fc1(x)
    module.mlp.linear_fc1.weight.data.mul_(2)
    board.expire(weights)
    expected = torch.nn.functional.linear(x, module.mlp.linear_fc1.weight, module.mlp.linear_fc1.bias)
    torch.testing.assert_close(module.mlp.linear_fc1(x), expected, rtol=0, atol=1e-6)


def test_dense_is_never_active():
    assert not Switchboard(KernelChoice.DENSE, PATTERN, Watch()).active
    assert Switchboard(KernelChoice.AUTO, PATTERN, Watch()).active
