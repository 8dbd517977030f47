"""Layer freezing as a dynamic family: decides at the step boundary, and lets the host rebuild what hangs on it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.freezing.autofreeze import AutoFreezeState, evaluation_due
from megatron_dyn.dynamics.freezing.cache import PrefixCache
from megatron_dyn.dynamics.freezing.plasticity import PlasticityState
from megatron_dyn.dynamics.freezing.reference import attach_reference, copy_reference, plasticity
from megatron_dyn.dynamics.freezing.settings import FLAG, EmbeddingRule, FreezeSettings, FrozenState, Method
from megatron_dyn.host.frozen import prefix_length
from megatron_dyn.ports import Change, Dynamic, Job


def from_args(args: Any) -> "Freezing":
    """The family that the arguments ask for. Raises ConfigError naming the flag."""
    settings = FreezeSettings.parse(
        args.dyn_freeze,
        num_layers=args.num_layers,
        embedding=args.dyn_freeze_embedding,
        state=args.dyn_freeze_state,
        cache_gib=args.dyn_freeze_cache_gib,
    )
    return Freezing(settings, num_layers=args.num_layers, num_steps=args.train_iters)


class Freezing(Dynamic):
    """One per rank."""

    name = "freeze"
    keeps_layers_apart = True
    freezes = True

    def __init__(self, settings: FreezeSettings, *, num_layers: int, num_steps: int) -> None:
        """`num_steps` is the length of the run."""
        self._settings, self._num_layers, self._num_steps = settings, num_layers, num_steps
        self._job: Job | None = None
        self._frozen: frozenset[int] = frozenset()
        self._embedding = False
        self._auto = AutoFreezeState()
        self._plastic = PlasticityState()
        self._reading: float | None = None
        self._watching = False
        self._cache = PrefixCache(int(settings.cache_gib * 2**30)) if settings.cache_gib else None

    def check(self, args: Any, others: Sequence[str]) -> None:
        """See ports.Dynamic."""
        for item in () if self._settings.schedule is None else self._settings.schedule.ranges:
            if item.start >= self._num_steps:
                raise ConfigError(f"{FLAG}: expected starts before the end of the run at {self._num_steps}, got {item.start}")
        if self._cache is None:
            return
        for flag, value in (
            ("--hidden-dropout", args.hidden_dropout),
            ("--attention-dropout", args.attention_dropout),
            ("--num-experts", args.num_experts),
            ("--sequence-parallel", args.sequence_parallel),
            ("--context-parallel-size", args.context_parallel_size - 1),
        ):
            if value:
                raise ConfigError(f"--dyn-freeze-cache-gib: what a frozen layer gives does not repeat with {flag}; drop one")

    def attach(self, layer: int, module: torch.nn.Module) -> None:
        """See ports.Dynamic."""
        if self._settings.method is Method.EGERIA:
            attach_reference(module)

            def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._read(layer, module, args, kwargs)

            module.register_forward_pre_hook(watch, with_kwargs=True)
        if self._cache is not None:
            self._cache.wrap(layer, module)

    def begin(self, job: Job, step: int, state: Any) -> None:
        """See ports.Dynamic."""
        self._job = job
        if state is not None:
            self._auto, self._plastic = AutoFreezeState(**state["autofreeze"]), PlasticityState(**state["plasticity"])
            self._freeze(frozenset(state["frozen"]), embedding=state["embedding"])

    def start(self, step: int) -> None:
        """See ports.Dynamic."""
        if self._settings.method is Method.EGERIA and step % self._settings.egeria.update == 0:
            self._copy_references()
        self._freeze(*self._due(step))

    def before_step(self, step: int) -> None:
        """See ports.Dynamic."""
        self._reading = None
        self._watching = self._settings.method is Method.EGERIA and step % self._settings.egeria.interval == 0
        if self._cache is not None and self._job is not None:
            self._cache.follow(self._job.layers, self._num_idle)

    def after_gradients(self, step: int) -> None:
        """See ports.Dynamic."""
        if self._settings.method is Method.AUTOFREEZE and self._job is not None:
            self._auto = self._auto.observe(self._job.gradient_norms())

    def at_boundary(self, step: int) -> Sequence[Change]:
        """See ports.Dynamic."""
        if self._settings.method is Method.AUTOFREEZE and evaluation_due(step, self._num_steps, self._settings.autofreeze):
            self._auto = self._auto.evaluate(self._settings.autofreeze.percentile)
        if self._settings.method is Method.EGERIA:
            self._judge(step)
        before = self._frozen
        frozen, embedding = self._due(step)
        if (frozen, embedding) == (before, self._embedding):
            return ()
        self._freeze(frozen, embedding)
        words = [f"layers {_spans(frozen - before)} frozen"] if frozen - before else []
        words += [f"layers {_spans(before - frozen)} train again"] if before - frozen else []
        details = {"frozen_layers": sorted(frozen), "embedding_frozen": embedding, "num_without_backward": self._num_idle}
        return [
            Change(family=self.name, iteration=step, what=", ".join(words) or "the embedding alone changed", details=details)
        ]

    def cost_changes(self) -> tuple[int, ...]:
        """See ports.Dynamic."""
        steps = () if self._settings.schedule is None else self._settings.schedule.steps
        return tuple(step for step in steps if 0 < step < self._num_steps)

    def state(self) -> Any:
        """See ports.Dynamic."""
        return {
            "frozen": sorted(self._frozen),
            "embedding": self._embedding,
            "autofreeze": asdict(self._auto),
            "plasticity": asdict(self._plastic),
        }

    def notes(self, layer: int) -> Mapping[str, Any]:
        """See ports.Dynamic."""
        backward = "none" if layer < self._num_idle else "input only" if layer in self._frozen else "full"
        return {"frozen": layer in self._frozen, "backward": backward}

    @property
    def _num_idle(self) -> int:
        """Layers that need no backward."""
        return prefix_length(self._frozen, embedding_frozen=self._embedding)

    def _due(self, step: int) -> tuple[frozenset[int], bool]:
        """(layers, embedding) to be frozen after `step` finished iterations."""
        schedule = self._settings.schedule
        if schedule is None:
            count = self._auto.num_frozen if self._settings.method is Method.AUTOFREEZE else self._plastic.num_frozen
            frozen, named = frozenset(range(count)), None
        else:
            frozen, named = schedule.frozen(step), schedule.embedding_frozen(step)
        follows = self._settings.embedding is EmbeddingRule.WITH_FIRST_LAYER and 0 in frozen
        return frozen, follows if named is None else named

    def _freeze(self, frozen: frozenset[int], embedding: bool) -> None:
        self._frozen, self._embedding = frozen, embedding
        if self._job is not None:
            self._job.set_trainable(frozen, embedding_frozen=embedding, park=self._settings.state is FrozenState.PARK)

    def _read(self, layer: int, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A layer is about to run: if it is the watched one, take its reading, once a step."""
        if self._watching and self._reading is None and layer == self._plastic.num_frozen and module.training:
            # Before the layer is called again, through the very hook that leads here.
            self._watching = False
            self._reading = plasticity(module, args, kwargs)

    def _judge(self, step: int) -> None:
        """Egeria's decision, from the reading of the first replica. All ranks call."""
        if self._job is None:
            return
        settings, rate = self._settings.egeria, self._job.learning_rate
        if step % settings.interval == 0:
            told = [reading for reading in self._job.gather(self._reading, "plasticity") if reading is not None]
            if told:
                # The lowest rank is the first replica, whatever stage the layer is on.
                self._plastic = self._plastic.observe(
                    told[0], learning_rate=rate, num_layers=self._num_layers, settings=settings
                )
        self._plastic = self._plastic.follow_rate(rate, settings)
        if step % settings.update == 0:
            self._copy_references()

    def _copy_references(self) -> None:
        if self._job is not None:
            self._job.settle_parameters()
            for module in self._job.layers.values():
                copy_reference(module)


def _spans(layers: Collection[int]) -> str:
    """`0-3, 7`."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][1] + 1:
            spans[-1][1] = layer
        else:
            spans.append([layer, layer])
    return ", ".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans)
