"""Runs one case: a common start, a run that measures layers all the time, and four ways to split them over two stages."""

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.dynamics.cases import Case
from benchmarks.dynamics.costs import deepspeed_layout, hindsight, points_of, trace_of
from benchmarks.training import timed_run
from megatron_dyn.records import Layout, uniform_layout

NUM_STAGES = 2
UNIFORM, PARAMETERS, HINDSIGHT, OURS = (
    "Megatron uniform",
    "DeepSpeed, by parameters",
    "best static in hindsight",
    "megatron_dyn",
)
REBALANCE: dict[str, Any] = {
    "dyn_rebalance": "auto",
    # The runs are short: a real job has thousands of steps between two changes, and keeps the defaults.
    "dyn_profile_window": 3,
    "dyn_profile_warmup": 1,
}

_TIMEOUT_SECONDS = 3600.0
"""A run takes about a minute; on a busy machine many."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one run left behind."""

    name: str
    lap_seconds: list[float]
    """By step: from its start to the start of the next."""
    losses: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    changes: list[dict[str, Any]]

    @property
    def layouts(self) -> list[str]:
        """By step: the layout in force."""
        return [line["layout"] for line in self.losses]

    @property
    def numbers(self) -> list[tuple[Any, ...]]:
        """By step: losses and gradient norm, in hex."""
        return [(line["iteration"], line["losses"], line["grad_norm"]) for line in self.losses]

    @property
    def loss_values(self) -> list[float]:
        """By step."""
        return [float.fromhex(line["losses"]["lm loss"]) for line in self.losses]


@dataclass(frozen=True, kw_only=True)
class Study:
    """All runs of one case."""

    case: str
    machine: str
    profile: Record
    """Uniform, sampled at nearly every step: where the costs of layers come from. Its step times count for nothing."""
    arms: list[Record]
    curves: dict[str, list[list[float]]]
    """What layers were expected to cost: by curve, by measured point and by layer, seconds of one micro-batch."""
    table: list[list[str]]
    """What else the case measured."""
    num_repeats: int = 1
    """How often each arm ran; the fastest run of each is kept, and it alone."""
    repeats_equal: bool = True
    """Whether the losses and gradient norms of the runs that were not kept are those of the profiled one, too."""

    @property
    def equal(self) -> bool:
        """Whether losses and gradient norms of all runs are the same in every bit."""
        return self.repeats_equal and all(arm.numbers == self.profile.numbers for arm in self.arms)

    def save(self, path: Path) -> None:
        """Write everything as JSON; folders are made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Study":
        """Read what `save` wrote; OSError when it is not there."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        fields["profile"] = Record(**fields["profile"])
        fields["arms"] = [Record(**arm) for arm in fields["arms"]]
        return cls(**fields)


def measure(case: Case, machine: str, num_repeats: int = 1) -> Study:
    """Run everything, one run after the other, the arms in turn. Raises RankFailure where a run fails.

    Of `num_repeats` runs of an arm the fastest is kept: what else a machine does can only make a run slower.
    """
    uniform = uniform_layout(case.num_layers, NUM_STAGES)
    with tempfile.TemporaryDirectory() as folder:
        _make_start(case, folder)
        profile = _run(case, "profile", folder, uniform, **_profile_flags(case))
        points = points_of(profile.rounds, case.every_steps)
        trace = trace_of(points, case.num_steps)
        static = {
            UNIFORM: uniform,
            PARAMETERS: deepspeed_layout(case.layer_parameters, case.end_parameters, NUM_STAGES),
            HINDSIGHT: hindsight(trace, uniform).hindsight_layout,
        }
        runs: list[list[Record]] = []
        for _ in range(num_repeats):
            arms = [_run(case, name, folder, layout) for name, layout in static.items()]
            runs.append([*arms, _run(case, OURS, folder, uniform, **REBALANCE)])
    return Study(
        case=case.name,
        machine=machine,
        profile=profile,
        arms=[min(of_arm, key=lambda run: sum(run.lap_seconds)) for of_arm in zip(*runs, strict=True)],
        curves={name: curve(points) for name, curve in case.curves.items()},
        table=case.table() if case.table is not None else [],
        num_repeats=num_repeats,
        repeats_equal=all(run.numbers == profile.numbers for arms in runs for run in arms),
    )


def _make_start(case: Case, folder: str) -> None:
    """One step without the family, saved: initial weights follow the split, so all runs load the same ones instead."""
    timed_run(
        NUM_STAGES,
        **{**case.model, "train_iters": 1, "save": folder, "save_interval": 1, "no_save_optim": True, "no_save_rng": True},
    )


def _profile_flags(case: Case) -> dict[str, Any]:
    """Rounds that measure and never move: no gain is large enough."""
    # One step early: what the family changes at a boundary makes all samples stale before the round that is due there.
    rounds = range(case.every_steps - 1, case.num_steps, case.every_steps)
    return {
        "dyn_rebalance": f"at:{','.join(map(str, rounds))}",
        "dyn_min_gain": 0.99,
        "dyn_profile_window": case.every_steps - 3,
        "dyn_profile_warmup": 1,
    }


def _run(case: Case, name: str, start: str, layout: Layout, **flags: Any) -> Record:
    timed = timed_run(
        NUM_STAGES,
        timeout_seconds=_TIMEOUT_SECONDS,
        **{
            **case.model,
            **case.family,
            "train_iters": case.num_steps,
            "load": start,
            "finetune": True,
            "pipeline_model_parallel_layout": layout.text,
            "dyn_exact_grad_norm": True,
            **flags,
        },
    )
    return Record(name=name, lap_seconds=timed.lap_seconds, losses=timed.losses, rounds=timed.rounds, changes=timed.changes)
