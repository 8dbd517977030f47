"""An entry that writes down what each pruning step saw and did, and what became of it by the end of the run."""

from collections.abc import Sequence
from typing import Any

from megatron_dyn.testing.training import train_with_plugin


def train_and_watch(argv: Sequence[str]) -> dict[str, Any]:
    """Train, and return for every pruning step the local weights that this rank speaks for, before and after, by key."""
    # Not at the top: it imports Megatron, which the platform has to precede.
    from megatron_dyn.dynamics.pruning import family

    steps: list[dict[Any, tuple[Any, Any]]] = []
    last: list[Any] = []
    original = family.prune_to

    def watching(level: float, weights: Sequence[Any], job: Any, settings: Any) -> Any:
        job.settle_parameters()
        mine = [weight for weight in weights if job.counts_here(weight.parameter)]
        before = {weight.key: weight.parameter.detach().float().flatten().clone() for weight in mine}
        choice = original(level, weights, job, settings)
        steps.append({weight.key: (before[weight.key].numpy(), weight.mask.flatten().clone().numpy()) for weight in mine})
        last[:] = weights
        return choice

    family.prune_to = watching
    try:
        train_with_plugin(argv)
    finally:
        family.prune_to = original
    revived = [weight.name for weight in last if weight.parameter.detach()[~weight.mask].any()]
    mains = {id(weight): getattr(weight.parameter, "main_param", None) for weight in last}
    revived += [
        f"main {weight.name}"
        for weight in last
        if (main := mains[id(weight)]) is not None and main.shape == weight.mask.shape and main.detach()[~weight.mask].any()
    ]
    return {"steps": steps, "revived": revived, "num_weights": len(last)}
