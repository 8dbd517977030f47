"""Training runs for the benchmarks: the real entry on real ranks, with the time of every step and the plugin's rounds."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_dyn.host.seams import Seam, apply
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments, train_with_plugin

# Big enough for timing, small enough for two cores: the head over this vocabulary weighs about five layers.
MODEL: dict[str, Any] = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "vocab_size": 16384,
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "pipeline_model_parallel_size": 2,
}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What a run took."""

    step_seconds: list[float]
    """On rank 0, by step."""
    lap_seconds: list[float]
    """On rank 0, by step: from its start to the start of the next, with all that is done between them (rounds, moves)."""
    rounds: list[dict[str, Any]]
    losses: list[dict[str, Any]]
    """The lines of losses.jsonl."""
    changes: list[dict[str, Any]]
    """The lines of dynamics.jsonl; none without a dynamic family."""
    extra: Any = None
    """What `after` returned on rank 0."""


def timed_run(
    world_size: int, *, after: Callable[[], Any] | None = None, timeout_seconds: float = 600.0, **flags: Any
) -> Timed:
    """Train with MODEL and `flags`; `after` runs on every rank when training is done, with its groups still alive."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny_gpt_arguments(**{**MODEL, "dyn_report_dir": folder, "dyn_record_losses": True, **flags})
        results = run_ranks(_train, world_size, argv, after, timeout_seconds=timeout_seconds)
        rounds, losses, changes = (_lines(Path(folder) / f"{name}.jsonl") for name in ("rounds", "losses", "dynamics"))
    step_seconds, lap_seconds, extra = results[0]
    return Timed(step_seconds=step_seconds, lap_seconds=lap_seconds, rounds=rounds, losses=losses, changes=changes, extra=extra)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _train(argv: Sequence[str], after: Callable[[], Any] | None) -> tuple[list[float], list[float], Any]:
    seconds: list[float] = []
    starts: list[float] = []
    extra: list[Any] = []

    def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            starts.append(time.perf_counter())
            result = original(*args, **kwargs)
            seconds.append(time.perf_counter() - starts[-1])
            return result

        return train_step

    def around_train(original: Callable[..., Any]) -> Callable[..., Any]:
        def train(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            extra.append(after() if after is not None else None)
            return result

        return train

    rows = [
        Seam(target=f"megatron.training.training:{name}", why="the benchmark looks", remove_when="never", wrap=wrap)
        for name, wrap in (("train_step", around_step), ("train", around_train))
    ]
    with apply(rows):
        train_with_plugin(argv)
    # Behind the last step comes the end of the run, which is no part of training.
    laps = [*(later - earlier for earlier, later in pairwise(starts)), *seconds[-1:]]
    return seconds, laps, extra[0]
