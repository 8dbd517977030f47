"""An entry with a family that looks at the job at one step: what the host tells it, and what the bare gradients say."""

from collections.abc import Sequence
from typing import Any

import torch

from megatron_dyn.args import add_dyn_args, config_from_args
from megatron_dyn.host.pretrain import main
from megatron_dyn.ports import Dynamic, Job


class Looking(Dynamic):
    """Records gradient norms at `step`, and silences every other element of one weight at the boundary after it."""

    name = "looking"

    def __init__(self, step: int) -> None:
        self.step, self.found, self.job = step, {}, None

    def begin(self, job: Job, step: int, state: Any) -> None:
        self.job = job

    def after_gradients(self, step: int) -> None:
        if step == self.step:
            self.found["norms"] = list(self.job.gradient_norms())

    def at_boundary(self, step: int) -> Sequence[Any]:
        if step == self.step:
            masks = {}
            for module in self.job.layers.values():
                weight = module.mlp.linear_fc1.weight
                masks[weight] = (torch.arange(weight.numel()) % 2 == 0).view(weight.shape)
            self.job.silence(masks)
            self.found["zeros"] = [int((weight == 0).sum()) * 2 >= weight.numel() for weight in masks]
            self.found["counted"] = self.job.sum_counts(
                torch.tensor([sum(self.job.counts_here(p) for m in self.job.layers.values() for p in m.parameters())]),
                "parameters",
            ).tolist()
            self.found["mine"] = {
                layer: sum(float(p.main_grad.double().square().sum()) for p in module.parameters())
                for layer, module in self.job.layers.items()
            }
        return ()


def look(argv: Sequence[str], step: int) -> dict[str, Any]:
    """Train, and return what the family found."""
    from megatron_dyn.installer import install

    family = Looking(step)

    def before_training(args: Any) -> Any:
        return install(args, config_from_args(args), [family]).undo

    main(argv, extra_args_providers=[add_dyn_args], before_training=before_training)
    return family.found
