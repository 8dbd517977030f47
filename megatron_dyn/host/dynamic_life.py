"""Carries the dynamic families through the life of a Megatron job: specs, building, loading, gradients, step boundary.

What a family does is its own affair (`megatron_dyn.dynamics`), what it may ask for is `host.dynamic_job`'s. Here is only when
it is asked. Off means absent: without a family none of these rows is applied.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Protocol

from megatron_dyn.host import checkpoint
from megatron_dyn.host.layout import layer_offset
from megatron_dyn.host.seams import Seam
from megatron_dyn.ports import Change, Dynamic, Job

STATE = "dyn_state"
"""Attribute of Megatron's arguments, and so of every checkpoint: the state of each family by its name."""


class Log(Protocol):
    """Where changes are written; report.ChangeLog implements it."""

    def write(self, change: Change) -> None:
        """Record one change."""

    def close(self) -> None:
        """The run is over."""


class DynamicLife:
    """One per rank and job."""

    def __init__(
        self,
        args: Any,
        families: Sequence[Dynamic],
        *,
        make_job: Callable[[list[Any], Any], Job],
        open_log: Callable[[], Log] | None,
    ) -> None:
        """`make_job(model, optimizer)` is called once, on all ranks; `open_log` on the one rank that writes, else None."""
        self._args, self._families = args, tuple(families)
        self._make_job, self._open_log = make_job, open_log
        self._job: Job | None = None
        self._log: Log | None = None
        self._step = 0

    def rows(self) -> tuple[Seam, ...]:
        """The ledger rows in force while a family is active; the step itself comes from JobDriver."""
        rows = [
            Seam(
                target="megatron.core.transformer.transformer_block:_get_block_submodules",
                why="families say from which module spec a layer is built",
                remove_when="Megatron takes a function that edits layer specs",
                parameters=("config", "spec", "vp_stage", "pp_rank"),
                wrap=self._around_specs,
            ),
            Seam(
                target="megatron.core.transformer.transformer_block:TransformerBlock._build_layers",
                why="families dress a layer before precision, DDP and optimizer are wrapped around it; 0.19 builds models in "
                "two ways that have no other place in common",
                remove_when="Megatron has a callback between building and wrapping a model",
                parameters=("self",),
                wrap=self._around_build,
            ),
            Seam(
                target="megatron.training.training:load_checkpoint",
                why="what a layer holds and what trains has to stand as it was saved before its state is loaded",
                remove_when="Megatron has a callback before loading",
                parameters=("ddp_model", "optimizer", "load_arg"),
                wrap=self._around_load,
            ),
            Seam(
                target="megatron.training.training:finalize_model_grads",
                why="the moment between reduced gradients and their norm",
                remove_when="Megatron's callback on_grads_finalized is in every supported release",
                parameters=("model", "num_tokens"),
                wrap=self._around_finalize,
            ),
        ]
        if any(family.keeps_layers_apart for family in self._families):
            rows.append(LAYERS_APART)
        return tuple(rows)

    def dress(self, layer: int, module: Any) -> None:
        """Let every family dress a layer that was just built."""
        for family in self._families:
            family.attach(layer, module)

    def notes(self, layer: int) -> Mapping[str, Any]:
        """What the families have to say on a local layer, by family."""
        told = {family.name: dict(family.notes(layer)) for family in self._families}
        return {name: notes for name, notes in told.items() if notes}

    def begin(self, model: list[Any], optimizer: Any, step: int, states: Mapping[str, Any]) -> None:
        """Model and optimizer exist. All ranks must call; only the first call counts."""
        if self._job is not None or not self._families:
            return
        self._job = self._make_job(model, optimizer)
        for family in self._families:
            family.begin(self._job, step, states.get(family.name))

    def start(self, model: list[Any], optimizer: Any, step: int) -> None:
        """Everything is loaded and the loop begins after iteration `step`. All ranks must call."""
        self.begin(model, optimizer, step, {})
        if self._open_log is not None:
            self._log = self._open_log()
        for family in self._families:
            family.start(step)
        self._keep_state()

    def before_step(self, step: int) -> None:
        """Iteration `step` begins."""
        self._step = step
        for family in self._families:
            family.before_step(step)

    def at_boundary(self, step: int) -> bool:
        """Let the families change the model; returns whether layers cost something else from now on."""
        changes = [change for family in self._families for change in family.at_boundary(step)]
        self._keep_state()
        for change in changes:
            if self._log is not None:
                self._log.write(change)
        return any(change.changes_costs for change in changes)

    def close(self) -> None:
        """The run is over, or failed. Idempotent."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def _keep_state(self) -> None:
        setattr(self._args, STATE, {family.name: family.state() for family in self._families})

    def _around_specs(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def get_block_submodules(
            config: Any, spec: Any, vp_stage: int | None = None, pp_rank: int | None = None, **options: Any
        ) -> Any:
            submodules = original(config, spec, vp_stage, pp_rank, **options)
            if not submodules.layer_specs or not self._families:
                return submodules
            first, edited = layer_offset(config, vp_stage), list(submodules.layer_specs)
            for index, layer_spec in enumerate(edited):
                for family in self._families:
                    layer_spec = family.layer_spec(first + index, layer_spec)
                edited[index] = layer_spec
            # A copy: Megatron may hand the same object to several chunks.
            return type(submodules)(layer_specs=edited, layer_norm=submodules.layer_norm)

        return get_block_submodules

    def _around_build(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def build_layers(block: Any) -> None:
            original(block)
            for layer in block.layers:
                self.dress(layer.layer_number - 1, layer)

        return build_layers

    def _around_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def load_checkpoint(
            ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, load_arg: str = "load", *rest: Any, **options: Any
        ) -> Any:
            step, states = checkpoint.saved_state(self._args, load_arg, STATE)
            if optimizer is not None:
                self.begin(ddp_model, optimizer, step, states)
            return original(ddp_model, optimizer, opt_param_scheduler, load_arg, *rest, **options)

        return load_checkpoint

    def _around_finalize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def finalize_model_grads(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            for family in self._families:
                family.after_gradients(self._step)
            return result

        return finalize_model_grads


def _with_layers_apart(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def build_metadata(*args: Any, **options: Any) -> Any:
        return {**original(*args, **options), "non_homogeneous_layers": True}

    return build_metadata


LAYERS_APART = Seam(
    target="megatron.training.checkpointing:_build_sharded_state_dict_metadata",
    why="stacked over the layers, a tensor that some layers lack cannot be saved",
    remove_when="Megatron always writes non-homogeneous layers",
    parameters=("args",),
    wrap=_with_layers_apart,
)
"""In force while layers may differ in what they carry, or in what the optimizer holds of them."""
