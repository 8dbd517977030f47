"""Ties the rounds to a running Megatron job: the seams of the training loop, and nothing else.

What a round does is not known here; the composition root injects it as `Rounds`, made when model and optimizer exist.
"""

import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Protocol

from megatron.core import parallel_state

from megatron_dyn.host.seams import Seam
from megatron_dyn.ports import JobError
from megatron_dyn.records import Layout
from megatron_dyn.report import ReportError

logger = logging.getLogger(__name__)

_TRAINING = "megatron.training.training"


class Rounds(Protocol):
    """What the loop calls; the controller implements it."""

    @property
    def layout_text(self) -> str:
        """The layout in force, in Megatron's syntax."""

    def request(self, layout: Layout) -> None:
        """Bring a layout in force at the next step boundary."""

    def begin(self, step: int) -> None:
        """Training starts after iteration `step`."""

    def before_step(self, step: int) -> None:
        """Iteration `step` begins."""

    def after_step(self, step: int, seconds: float) -> None:
        """Iteration `step` took `seconds`."""

    def costs_changed(self) -> None:
        """Layers cost something else from now on."""

    def at_boundary(self, step: int) -> None:
        """Layers may move now."""

    def close(self) -> None:
        """The run is over."""


class Life(Protocol):
    """What the dynamic families do in a step; DynamicLife implements it."""

    def start(self, model: list[Any], optimizer: Any, step: int) -> None:
        """Training starts after iteration `step`."""

    def before_step(self, step: int) -> None:
        """Iteration `step` begins."""

    def at_boundary(self, step: int) -> bool:
        """The model may change now; returns whether layers cost something else from now on."""

    def close(self) -> None:
        """The run is over."""


class Losses(Protocol):
    """Where the losses of a step go; report.LossLog implements it."""

    def write(self, iteration: int, losses: Mapping[str, float], grad_norm: float | None, layout: str) -> None:
        """Record one step."""

    def close(self) -> None:
        """The run is over."""


class JobDriver:
    """One per rank and job."""

    def __init__(
        self,
        args: Any,
        *,
        layout_text: str,
        make_rounds: Callable[[list[Any], Any], Rounds] | None,
        open_losses: Callable[[], Losses] | None,
        life: Life | None = None,
    ) -> None:
        """`make_rounds(model, optimizer)` is called on all ranks once both exist; None: no moves in this run.

        `open_losses` is called on the one rank that holds the loss; None: losses are not recorded. `life` is that of the
        dynamic families; None: the model does not change.
        """
        self._life = life
        self._args, self._layout_text = args, layout_text
        self._make_rounds, self._open_losses = make_rounds, open_losses
        self._rounds: Rounds | None = None
        self._losses: Losses | None = None

    def request(self, layout: Layout) -> None:
        """Pass a request on to the rounds; see Rounds.request. Raises RuntimeError while no training runs."""
        if self._rounds is None:
            raise RuntimeError("a layout can be requested while training runs and layers may move, not before or after")
        self._rounds.request(layout)

    def rows(self) -> tuple[Seam, ...]:
        """The ledger rows this job needs: none that has nothing to do."""
        rows = [
            Seam(
                target=f"{_TRAINING}:train",
                why="the start and the end of the loop, whichever way it ends",
                remove_when="Megatron's callbacks on_train_start and on_train_end are in every supported release",
                parameters=("model", "optimizer"),
                wrap=self._around_train,
            ),
            Seam(
                target=f"{_TRAINING}:train_step",
                why="the start and the end of a step, its losses and its gradient norm",
                remove_when="Megatron's callbacks on_train_step_start and on_train_step_end are in every supported release",
                parameters=("model", "optimizer"),
                wrap=self._around_step,
            ),
        ]
        if self._make_rounds is not None or self._life is not None:
            rows.append(
                Seam(
                    target=f"{_TRAINING}:post_training_step_callbacks",
                    why="the step boundary: after the optimizer, before checkpointing, the only safe place for a move",
                    remove_when="Megatron's callback on_train_step_end comes with the iteration, before checkpointing",
                    parameters=("model", "optimizer", "iteration"),
                    wrap=self._after_callbacks,
                )
            )
        return tuple(rows)

    def _around_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def train(forward_step_func: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if self._open_losses is not None and _holds_the_loss():
                    self._losses = self._open_losses()
                if self._life is not None:
                    self._life.start(model, optimizer, self._args.iteration)
                if self._make_rounds is not None:
                    self._rounds = self._make_rounds(model, optimizer)
                    self._rounds.begin(self._args.iteration)
                return original(forward_step_func, model, optimizer, *args, **kwargs)
            except (JobError, ReportError) as error:
                self._close()
                _end_the_job(error)
            finally:
                self._close()

        return train

    def _around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            # Megatron counts the steps done before this one; its counter also moves when it skips iterations.
            step = kwargs["iteration"] + 1 if "iteration" in kwargs else self._args.curr_iteration + 1
            if self._life is not None:
                self._life.before_step(step)
            layout = self._rounds.layout_text if self._rounds else self._layout_text
            if self._rounds is not None:
                self._rounds.before_step(step)
            started = time.perf_counter()
            result = original(*args, **kwargs)
            if self._rounds is not None:
                self._rounds.after_step(step, time.perf_counter() - started)
            if self._losses is not None:
                self._record(step, result[0], result[5], layout)
            return result

        return train_step

    def _record(self, step: int, losses: Mapping[str, Any], grad_norm: Any, layout: str) -> None:
        numbers = {name: float(loss) for name, loss in losses.items()}
        try:
            self._losses.write(step, numbers, None if grad_norm is None else float(grad_norm), layout)
        except OSError as error:
            # A full disk must not end a run that trains well.
            logger.error("losses of step %d could not be recorded: %s", step, error)

    def _after_callbacks(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def post_training_step_callbacks(
            model: Any, optimizer: Any, opt_param_scheduler: Any, iteration: int, *args: Any, **kwargs: Any
        ) -> Any:
            result = original(model, optimizer, opt_param_scheduler, iteration, *args, **kwargs)
            changed = self._life is not None and self._life.at_boundary(iteration)
            if self._rounds is not None:
                if changed:
                    self._rounds.costs_changed()
                self._rounds.at_boundary(iteration)
            return result

        return post_training_step_callbacks

    def _close(self) -> None:
        rounds, losses = self._rounds, self._losses
        self._rounds = self._losses = None
        for open_thing in (rounds, losses, self._life):
            try:
                if open_thing is not None:
                    open_thing.close()
            except OSError as error:
                # What a full disk did not take at the last write is tried again here; Megatron has its last save to do.
                logger.error("a report could not be closed: %s", error)


def _holds_the_loss() -> bool:
    """True on exactly one rank: last stage, first of its tensor, context and data parallel groups."""
    return (
        parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def _end_the_job(error: Exception) -> None:
    """One line, then out at once: tearing down process groups whose peers are gone can wait for ever."""
    sys.stdout.flush()
    sys.stderr.write(f"megatron_dyn: error: {error}\n")
    sys.stderr.flush()
    # They would outlive the rank and hold the launcher's pipes open: a writer of checkpoints waits for its next save for ever.
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(1)
