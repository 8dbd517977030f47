"""Training runs for the benchmarks: the real entry on real ranks, with the time of every step and the plugin's rounds."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
    rounds: list[dict[str, Any]]
    extra: Any = None
    """What `after` returned on rank 0."""


def timed_run(
    world_size: int, *, after: Callable[[], Any] | None = None, timeout_seconds: float = 600.0, **flags: Any
) -> Timed:
    """Train with MODEL and `flags`; `after` runs on every rank when training is done, with its groups still alive."""
    with tempfile.TemporaryDirectory() as folder:
        argv = tiny_gpt_arguments(**{**MODEL, "dyn_report_dir": folder, "dyn_record_losses": True, **flags})
        results = run_ranks(_train, world_size, argv, after, timeout_seconds=timeout_seconds)
        path = Path(folder) / "rounds.jsonl"
        rounds = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return Timed(step_seconds=results[0][0], rounds=rounds, extra=results[0][1])


def _train(argv: Sequence[str], after: Callable[[], Any] | None) -> tuple[list[float], Any]:
    seconds: list[float] = []
    extra: list[Any] = []

    def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_step(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            result = original(*args, **kwargs)
            seconds.append(time.perf_counter() - started)
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
    return seconds, extra[0]
