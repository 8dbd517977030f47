"""Which kernel multiplies with which weight: chosen once per level for the whole job, put into the layers that are here.

Collaborators: crossover (what is fastest), linear (where kernels sit). The choice is the same on all ranks and is kept over
moves and in checkpoints; what a layer holds follows from it and from the layer's masks, on whatever rank it is.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_dyn.dynamics.pruning.crossover import Stopwatch, Times, fastest
from megatron_dyn.dynamics.pruning.kernels import Product
from megatron_dyn.dynamics.pruning.linear import PrunableLinear
from megatron_dyn.dynamics.pruning.pattern import Pattern
from megatron_dyn.dynamics.pruning.settings import KernelChoice
from megatron_dyn.dynamics.pruning.sparse_weight import Kernels, SparseWeight
from megatron_dyn.dynamics.pruning.threshold import Gather
from megatron_dyn.dynamics.pruning.weights import Weight

Chosen = Mapping[tuple[int, str], Mapping[str, str]]
"""(layer, name of the weight) -> product -> kernel; plain words, for checkpoints. What is not in it is dense."""


class Switchboard:
    """One per rank."""

    def __init__(self, choice: KernelChoice, pattern: Pattern, stopwatch: Stopwatch) -> None:
        """With `choice` dense it does nothing, ever."""
        self._choice, self._pattern, self._stopwatch = choice, pattern, stopwatch
        self.chosen: Chosen = {}

    @property
    def active(self) -> bool:
        """Whether anything but dense can come of it."""
        return self._choice is not KernelChoice.DENSE

    def choose(self, weights: Sequence[tuple[Any, Weight, int]], gather: Gather) -> None:
        """Choose anew for the masks now in force; kernels that sit in layers are dropped. All ranks must call.

        `weights` are the local (layer module, weight, tokens of a micro-batch that reach it).
        """
        for module, weight, _ in weights:
            if (linear := _linear_of(module, weight)) is not None:
                linear.sparse = None
        if self._choice is not KernelChoice.AUTO:
            return
        mine: dict[tuple[int, str], Times] = {}
        for module, weight, num_tokens in weights:
            if _linear_of(module, weight) is not None:
                mine[weight.layer, weight.name] = self._stopwatch.times(weight.parameter, weight.mask, num_tokens)
        times: dict[tuple[int, str], list[Times]] = {}
        for theirs in gather(mine, "times of kernels"):
            for key, found in theirs.items():
                times.setdefault(key, []).append(found)
        chosen = {key: {product.value: name for product, name in fastest(found).items()} for key, found in times.items()}
        self.chosen = {key: kernels for key, kernels in sorted(chosen.items()) if kernels}

    def install(self, weights: Sequence[tuple[Any, Weight, int]]) -> None:
        """Put kernels into the local layers that have none yet: after a choice, an arrival, a resume."""
        for module, weight, _ in weights:
            linear, wanted = _linear_of(module, weight), self._wanted(weight)
            if linear is not None and linear.sparse is None and wanted:
                linear.sparse = SparseWeight(weight.mask, self._pattern, weight.parameter.dtype, wanted)

    def in_use(self, module: Any, weights: Sequence[Weight]) -> dict[str, dict[str, str]]:
        """The kernel of each product of each weight of a local layer, those that are not dense."""
        used = {weight.name: sparse.kernels for weight, sparse in _sparse(module, weights)}
        return {name: kernels for name, kernels in used.items() if kernels}

    def expire(self, weights: Sequence[tuple[Any, Weight, int]]) -> None:
        """The optimizer is about to change the values."""
        for module, weight, _ in weights:
            for _, sparse in _sparse(module, [weight]):
                sparse.expire()

    def _wanted(self, weight: Weight) -> Kernels:
        if self._choice is KernelChoice.AUTO:
            return {Product(product): name for product, name in self.chosen.get((weight.layer, weight.name), {}).items()}
        return dict.fromkeys(Product, self._choice.value)


def _linear_of(module: Any, weight: Weight) -> PrunableLinear | None:
    """The linear layer that the weight is in, if it is one that kernels can be put into."""
    linear = module.get_submodule(weight.name.rpartition(".")[0])
    return linear if isinstance(linear, PrunableLinear) else None


def _sparse(module: Any, weights: Sequence[Weight]) -> Iterator[tuple[Weight, SparseWeight]]:
    for weight in weights:
        if (linear := _linear_of(module, weight)) is not None and linear.sparse is not None:
            yield weight, linear.sparse
