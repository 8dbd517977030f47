"""Runs of the real entry with the plugin on real ranks, and what they leave behind, bit for bit.

Collaborators: megatron_dyn.testing (ranks, tiny model), state_dump (what model and optimizer hold).
"""

import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dyn.host.seams import Seam, apply
from megatron_dyn.testing.footing import Footing, footing
from megatron_dyn.testing.ranks import RankResult, run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from megatron_dyn.testing.training import train_with_plugin as train
from tests.distributed.state_dump import dump_state, merge

REPORT_FLAGS = {"dyn_record_losses": True, "dyn_exact_grad_norm": True}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run gave."""

    losses: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    changes: list[dict[str, Any]]
    """What dynamic families did."""
    state: dict[str, dict[str, Any]]
    """By global parameter name: digests of parameter, main parameter and moments, learning rate, weight decay; buffers."""
    consumed_samples: int
    footings: list[list[Footing]]
    """By rank: what the process stands on between steps, after any move; empty unless asked for."""

    def numbers(self) -> list[tuple[Any, ...]]:
        """What must be equal with and without moves."""
        return [(line["iteration"], line["losses"], line["grad_norm"]) for line in self.losses]


def run(world_size: int, *, timeout_seconds: float = 150.0, extra: Sequence[str] = (), watch: int = 0, **flags: Any) -> Run:
    """Train the tiny GPT with the plugin's entry; keywords are flags. Raises RankFailure when a rank fails.

    `watch` takes the footing of every rank at every so many steps.
    """
    with tempfile.TemporaryDirectory() as folder:
        argv = [*tiny_gpt_arguments(**{"dyn_report_dir": folder, **REPORT_FLAGS, **flags}), *extra]
        dumps = run_ranks(train_and_dump, world_size, argv, watch, timeout_seconds=timeout_seconds)
        return Run(
            losses=read_lines(Path(folder) / "losses.jsonl"),
            rounds=read_lines(Path(folder) / "rounds.jsonl"),
            changes=read_lines(Path(folder) / "dynamics.jsonl"),
            state=merge([dump["state"] for dump in dumps]),
            consumed_samples=dumps[0]["consumed_samples"],
            footings=[dump["footings"] for dump in dumps],
        )


def run_to_exit(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 90.0, **flags: Any
) -> list[RankResult]:
    """Run `function(argv, *args)` on every rank and return how each ended, whatever that is."""
    argv = tiny_gpt_arguments(**flags)
    return run_ranks(function, world_size, argv, *args, timeout_seconds=timeout_seconds, expect_exit=True)


def train_and_dump(argv: Sequence[str], watch: int = 0) -> dict[str, Any]:
    """Train, then describe this rank's model and optimizer, and what it stood on at every `watch` steps."""
    found: dict[str, Any] = {"footings": []}
    counted = [0]

    def around_train(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_and_look(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(forward_step, model, optimizer, *args, **kwargs)
            host_args = importlib.import_module("megatron.training").get_args()
            found.update(state=dump_state(model, optimizer), consumed_samples=host_args.consumed_train_samples)
            return result

        return train_and_look

    def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def step_and_look(forward_step: Any, data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
            # At the start of a step the move of the boundary before it is done.
            counted[0] += 1
            if counted[0] % watch == 0:
                found["footings"].append(footing(model))
            return original(forward_step, data, model, *args, **kwargs)

        return step_and_look

    training = "megatron.training.training"
    rows = [row(f"{training}:train", around_train), *([row(f"{training}:train_step", around_step)] if watch else [])]
    with apply(rows):
        train(argv)
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none when it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def row(target: str, wrap: Callable[..., Any]) -> Seam:
    """A seam through which a test looks at a run, or interferes with it."""
    return Seam(target=target, why="the test looks", remove_when="never", wrap=wrap)
