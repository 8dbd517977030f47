"""Runs of the real entry in which something breaks on purpose, and what each rank was before and after.

Collaborators: sabotage (what breaks), state_dump (what model and optimizer hold). Each rank leaves a `Record` in a file,
since a rank that is killed returns nothing.
"""

import importlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dyn.host.seams import Seam, apply
from megatron_dyn.testing.ranks import RankResult
from megatron_dyn.testing.training import train_with_plugin
from tests.distributed.plugin_run import REPORT_FLAGS, read_lines, run_to_exit
from tests.distributed.sabotage import Deed, Fault, Observer, Place, Saboteur
from tests.distributed.state_dump import digest, dump_state

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(kw_only=True)
class Record:
    """What one rank was. States are what `state_dump.dump_state` makes of it, with the extra state of the layers."""

    rank: int
    before: dict[str, Any] = field(default_factory=dict)
    """When the last move began."""
    after: dict[str, Any] | None = None
    """When training ended, in whatever way; None where the rank was killed, or failed in the middle of a commit."""
    layout: str | None = None
    """What Megatron's arguments say at the end."""
    layers: list[int] = field(default_factory=list)
    """Global ids of the layers that are here at the end."""
    traces: list[dict[str, Any]] = field(default_factory=list)
    """Before each step: the layers, and all that a move could leave behind."""
    struck_at_seconds: float | None = None
    """When its last fault struck, in seconds of the epoch."""


@dataclass(frozen=True, kw_only=True)
class FaultyRun:
    """What a run with faults left behind."""

    results: list[RankResult]
    records: list[Record]
    rounds: list[dict[str, Any]]
    losses: list[dict[str, Any]]
    reaction_seconds: float
    """From the last fault to the end of the last rank."""

    def numbers(self) -> list[tuple[Any, ...]]:
        """What must be equal with and without faults."""
        return [(line["iteration"], line["losses"], line["grad_norm"]) for line in self.losses]

    def exitcodes(self) -> list[int]:
        """By rank."""
        return [result.exitcode for result in self.results]


def run_with_faults(folder: Path, world_size: int, *faults: Fault, timeout_seconds: float = 90.0, **flags: Any) -> FaultyRun:
    """Train the tiny GPT until every rank has ended, in whatever way. `folder` is for reports and records."""
    folder.mkdir(exist_ok=True)
    flags = {"dyn_report_dir": str(folder), **REPORT_FLAGS, **flags}
    results = run_to_exit(world_size, train, faults, str(folder), timeout_seconds=timeout_seconds, **flags)
    ended_at_seconds = time.time()
    records = [pickle.loads(_path(folder, rank).read_bytes()) for rank in range(world_size)]
    return FaultyRun(
        results=results,
        records=records,
        rounds=read_lines(folder / "rounds.jsonl"),
        losses=read_lines(folder / "losses.jsonl"),
        reaction_seconds=ended_at_seconds - max(record.struck_at_seconds or 0.0 for record in records),
    )


def train(argv: Sequence[str], faults: Sequence[Fault], folder: str) -> None:
    """Body of a rank: train with the plugin's entry while `faults` strike, and leave a Record in `folder`."""
    rank = int(os.environ["RANK"])
    witness = _Witness(rank, _path(Path(folder), rank))
    observer = Observer(move_begins=witness.move_begins, fault_strikes=witness.fault_strikes)
    Saboteur([fault for fault in faults if fault.rank == rank], observer).get_ready()
    with apply([_row("train", witness.around_train), _row("train_step", witness.around_step)]):
        train_with_plugin(argv)


class _Witness:
    """Keeps the Record of this rank, in a file."""

    def __init__(self, rank: int, path: Path) -> None:
        self._record, self._path = Record(rank=rank), path
        self._model: list[Any] = []
        self._optimizer: Any = None
        self._half_committed = False

    def around_train(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def train_and_look(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._model, self._optimizer = model, optimizer
            try:
                return original(forward_step, model, optimizer, *args, **kwargs)
            finally:
                # The plugin's own wrapper is around this one, so a job that it ends passes here first.
                self._describe_end()
                self._save()

        return train_and_look

    def around_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def look_and_step(*args: Any, **kwargs: Any) -> Any:
            self._record.traces.append(self._trace())
            return original(*args, **kwargs)

        return look_and_step

    def move_begins(self) -> None:
        self._record.before = self._state()
        self._save()

    def fault_strikes(self, fault: Fault) -> None:
        self._record.struck_at_seconds = time.time()
        self._half_committed |= fault.deed is Deed.RAISE and fault.place in (Place.COMMIT, Place.REWRAP)
        self._save()

    def _save(self) -> None:
        self._path.write_bytes(pickle.dumps(self._record))

    def _describe_end(self) -> None:
        host_args = importlib.import_module("megatron.training").get_args()
        self._record.layout = host_args.pipeline_model_parallel_layout
        self._record.layers = [layer.layer_number - 1 for layer in self._layers()]
        if not self._half_committed:
            self._record.after = self._state()

    def _layers(self) -> list[Any]:
        model = self._model[0]
        while hasattr(model, "module"):
            model = model.module
        return list(model.decoder.layers)

    def _state(self) -> dict[str, Any]:
        torch = importlib.import_module("torch")
        state = dump_state(self._model, self._optimizer)
        for layer in self._layers():
            extra = torch.tensor(layer.input_layernorm.num_seen)
            state[f"extra {layer.layer_number - 1}"] = {"parameter": digest(extra), "pieces": {}}
        return state

    def _trace(self) -> dict[str, Any]:
        c10d = importlib.import_module("torch.distributed.distributed_c10d")
        ddp = self._model[0]
        return {
            "layers": [layer.layer_number - 1 for layer in self._layers()],
            "process groups": len(c10d._world.pg_map),
            "module hooks": sum(len(getattr(module, kind)) for module in ddp.modules() for kind in HOOKS),
            "gradient hooks": len(ddp.grad_accs),
            "python threads": sorted(thread.name for thread in threading.enumerate()),
            "threads": len(os.listdir("/proc/self/task")),
        }


def _path(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.pickle"


def _row(name: str, wrap: Callable[..., Any]) -> Seam:
    return Seam(target=f"megatron.training.training:{name}", why="the test looks", remove_when="never", wrap=wrap)
