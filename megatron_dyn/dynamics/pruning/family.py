"""Pruning as a family of dynamic models: when it happens, what it asks of the job, what a layer carries.

The masks are buffers of the layer, so that they move and are saved with it. Everything is decided from counts over all ranks,
so that neither the layout nor any move can be told from the result.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.crossover import Stopwatch
from megatron_dyn.dynamics.pruning.linear import with_prunable_linears
from megatron_dyn.dynamics.pruning.pattern import Kind
from megatron_dyn.dynamics.pruning.removal import prune_to
from megatron_dyn.dynamics.pruning.settings import KernelChoice, PruneSettings
from megatron_dyn.dynamics.pruning.switchboard import Switchboard
from megatron_dyn.dynamics.pruning.threshold import Choice
from megatron_dyn.dynamics.pruning.weights import MASKS, Weight, prunable
from megatron_dyn.host.carried import Carried, cut_of
from megatron_dyn.ports import Change, Dynamic, Job, JobError


def from_args(args: Any) -> Dynamic:
    """The family as `args` want it. Raises ConfigError naming the flag."""
    return Pruning(PruneSettings.from_args(args), args)


class Pruning(Dynamic):
    """One per rank."""

    name = "prune"
    keeps_layers_apart = True

    def __init__(self, settings: PruneSettings, args: Any) -> None:
        """`args` are Megatron's, validated."""
        self._settings, self._args = settings, args
        num_micro_batches = args.global_batch_size // (args.micro_batch_size * args.data_parallel_size)
        stopwatch = Stopwatch(settings.pattern, num_micro_batches=num_micro_batches)
        self._board = Switchboard(settings.kernels, settings.pattern, stopwatch)
        self._job: Job | None = None
        self._level = 0.0
        self._saved_pattern = settings.pattern.text

    def check(self, args: Any, others: Sequence[str]) -> None:
        """See ports.Dynamic. Pruning goes with every other family."""
        kernels, pattern = self._settings.kernels, self._settings.pattern
        if kernels in (KernelChoice.AUTO, KernelChoice.DENSE):
            return
        on_gpu = torch.cuda.is_available() and getattr(args, "dyn_device", "auto") != "cpu"
        if args.transformer_impl != "local":
            needed = f"--transformer-impl local, got {args.transformer_impl}"
        elif args.gradient_accumulation_fusion:
            needed = "--no-gradient-accumulation-fusion beside it, got none"
        elif kernels is KernelChoice.BSR and pattern.kind is not Kind.BLOCK:
            needed = f"--dyn-prune-pattern block:RxC, got {pattern.text}"
        elif kernels is KernelChoice.SEMI_STRUCTURED and pattern.text != "2:4":
            needed = f"--dyn-prune-pattern 2:4, got {pattern.text}"
        elif (kernels is KernelChoice.CSR and on_gpu) or (kernels is KernelChoice.SEMI_STRUCTURED and not on_gpu):
            needed = f"a {'CPU' if on_gpu else 'GPU'}, got a {'GPU' if on_gpu else 'CPU'}"
        else:
            return
        raise ConfigError(f"--dyn-prune-kernels {kernels.value}: expected {needed}")

    def layer_spec(self, layer: int, spec: Any) -> Any:
        """See ports.Dynamic."""
        return with_prunable_linears(spec) if self._board.active else spec

    def attach(self, layer: int, module: Any) -> None:
        """See ports.Dynamic: give the layer its masks, which hide nothing yet."""
        carried = Carried()
        for name, parameter in prunable(module, self._settings.exclude).items():
            carried.put(name, torch.ones_like(parameter, dtype=torch.bool), cut_of(parameter))
        module.add_module(MASKS, carried)

    def begin(self, job: Job, step: int, state: Any) -> None:
        """See ports.Dynamic."""
        self._job = job
        for module in job.layers.values():
            # A checkpoint of a run that did not prune yet, or of which only the weights are taken, is complete without them.
            module.get_submodule(MASKS).saved = state is not None
        if state is not None:
            self._level, self._saved_pattern = state["level"], state["pattern"]
            self._board.chosen = state["kernels"]

    def start(self, step: int) -> None:
        """See ports.Dynamic. Raises JobError for weights that cannot be pruned as the flags say."""
        for module in self._known_job.layers.values():
            module.get_submodule(MASKS).saved = True
        self._check_weights()
        self._install()

    def before_step(self, step: int) -> None:
        """See ports.Dynamic: layers that have just arrived get the kernels that were chosen for them."""
        self._install()

    def after_gradients(self, step: int) -> None:
        """See ports.Dynamic: nothing may move a pruned weight, nor count in the norm."""
        if not self._level:
            return
        for weight in self._weights():
            gradient = getattr(weight.parameter, "main_grad", None)
            if gradient is not None and weight.parameter.requires_grad:
                gradient.mul_(weight.mask)
        if self._board.active:
            self._board.expire(self._placed())

    def at_boundary(self, step: int) -> Sequence[Change]:
        """See ports.Dynamic: prune to the level that is due, if it is not in force."""
        level = self._settings.schedule.level(step)
        if level <= self._level:
            return ()
        choice = prune_to(level, self._weights(), self._known_job, self._settings)
        self._level = level
        started = time.perf_counter()
        if self._board.active:
            self._board.choose(self._placed(), self._known_job.gather)
            self._install()
        return (self._change(step, choice, time.perf_counter() - started),)

    def cost_changes(self) -> tuple[int, ...]:
        """See ports.Dynamic."""
        return self._settings.schedule.steps

    def state(self) -> Any:
        """See ports.Dynamic."""
        return {"level": self._level, "pattern": self._settings.pattern.text, "kernels": self._board.chosen}

    def notes(self, layer: int) -> Mapping[str, Any]:
        """See ports.Dynamic."""
        module = self._known_job.layers[layer]
        weights = self._weights_of(layer, module)
        num_weights = sum(weight.mask.numel() for weight in weights)
        if not num_weights:
            return {}
        num_kept = sum(int(weight.mask.sum()) for weight in weights)
        return {"sparsity": 1.0 - num_kept / num_weights, "kernels": self._board.in_use(module, weights)}

    @property
    def _known_job(self) -> Job:
        assert self._job is not None, "begin comes first"
        return self._job

    def _weights_of(self, layer: int, module: Any) -> list[Weight]:
        carried = module.get_submodule(MASKS)
        return [Weight(layer, name, module.get_parameter(name), carried.get(name)) for name in carried.names()]

    def _weights(self) -> list[Weight]:
        return [weight for layer, module in self._known_job.layers.items() for weight in self._weights_of(layer, module)]

    def _placed(self) -> list[tuple[Any, Weight, int]]:
        """Every local weight with its layer and the tokens of a micro-batch that reach it."""
        args = self._args
        num_tokens = args.micro_batch_size * args.seq_length // args.context_parallel_size
        placed = []
        for layer, module in self._known_job.layers.items():
            for weight in self._weights_of(layer, module):
                routed = ".local_experts." in weight.name
                share = num_tokens * args.moe_router_topk // args.num_experts if routed else num_tokens
                placed.append((module, weight, max(1, share)))
        return placed

    def _install(self) -> None:
        if self._level and self._board.active:
            self._board.install(self._placed())

    def _check_weights(self) -> None:
        pattern = self._settings.pattern
        if self._level and self._saved_pattern != pattern.text:
            raise JobError(
                f"--dyn-prune-pattern: expected {self._saved_pattern}, as in the checkpoint that is loaded, got {pattern.text}"
            )
        mine = {(weight.layer, weight.name): tuple(weight.mask.shape) for weight in self._weights()}
        found: dict[tuple[int, str], tuple[int, int]] = {}
        for theirs in self._known_job.gather(mine, "weights to prune"):
            found |= theirs
        if not found:
            raise JobError("--dyn-prune: expected linear layers to prune in the decoder layers, got none")
        for (layer, name), shape in sorted(found.items()):
            if objection := pattern.objection(shape):
                place = f"--dyn-prune-pattern {pattern.text}: layer {layer}: {name}"
                raise JobError(f"{place}: {objection}; leave it out with --dyn-prune-exclude")

    def _change(self, step: int, choice: Choice, choosing_seconds: float) -> Change:
        """What is in force after this step, over all ranks. All ranks must call."""
        counts = torch.zeros(self._args.num_layers, 2, dtype=torch.int64)
        for weight in self._weights():
            if self._known_job.counts_here(weight.parameter):
                counts[weight.layer] += torch.tensor([int(weight.mask.sum()), weight.mask.numel()])
        by_layer = self._known_job.sum_counts(counts, "weights that stay").tolist()
        kept, num_weights = (sum(column) for column in zip(*by_layer, strict=True))
        thresholds = list(choice.thresholds)
        return Change(
            family=self.name,
            iteration=step,
            what=f"level {self._level:.4f}: {kept:,} of {num_weights:,} weights stay",
            details={
                "level": self._level,
                "num_weights": num_weights,
                "num_kept": kept,
                "thresholds": thresholds,
                "sparsity_by_layer": [1.0 - left / size if size else None for left, size in by_layer],
                "kernels": _tally(self._board.chosen),
                "choosing_seconds": choosing_seconds,
            },
        )


def _tally(chosen: Mapping[Any, Mapping[str, str]]) -> dict[str, dict[str, int]]:
    """How many weights have which kernel, by product; the rest is dense."""
    tally: dict[str, dict[str, int]] = {}
    for kernels in chosen.values():
        for product, kernel in kernels.items():
            tally.setdefault(product, {}).setdefault(kernel, 0)
            tally[product][kernel] += 1
    return tally
