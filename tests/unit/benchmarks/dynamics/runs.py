"""Made-up studies of cases, with costs that are easy to check."""

import math
from dataclasses import replace
from typing import Any

from benchmarks.dynamics.arms import HINDSIGHT, OURS, PARAMETERS, UNIFORM, Record, Study
from benchmarks.dynamics.cases import CASES, Case

FREEZING = replace(CASES["freezing"], num_steps=120, every_steps=30)


def measured_round(iteration: int, layers: list[tuple[float, float]], **notes: Any) -> dict[str, Any]:
    """A line of rounds.jsonl: (forward, backward) seconds by layer; `notes` by family, the same for all layers."""
    fields = [{"layer": i, "forward_seconds": f, "backward_seconds": b} for i, (f, b) in enumerate(layers)]
    if notes:
        fields = [line | {"dynamics": notes} for line in fields]
    end = {"forward_seconds": 0.0, "backward_seconds": 0.0}
    line = {"iteration": iteration, "outcome": "no_change", "layers": fields, "embedding": end, "head": end}
    return line | {"num_microbatches": 8}


def frozen_rounds() -> list[dict[str, Any]]:
    """12 layers of 1 + 2 seconds that freeze as the case says."""
    full, middle, prefix = (1.0, 2.0), (1.0, 1.0), (1.0, 0.0)
    rows = [
        [full] * 12,
        [prefix] * 3 + [full] * 6 + [middle] + [full] * 2,
        [prefix] * 6 + [full] * 6,
        [prefix] * 9 + [full] * 3,
    ]
    return [measured_round(29 + 30 * index, row) for index, row in enumerate(rows)]


def record(name: str, layouts: list[str], seconds: float, rounds: Any = (), changes: Any = ()) -> Record:
    losses = [
        {"iteration": step, "losses": {"lm loss": (5.0 / step).hex()}, "grad_norm": "0x1p0", "layout": layout}
        for step, layout in enumerate(layouts, 1)
    ]
    laps = [seconds] * len(layouts)
    return Record(name=name, lap_seconds=laps, losses=losses, rounds=list(rounds), changes=list(changes))


def differing() -> Study:
    """The study, but for the last bit of one loss in our arm."""
    found = study()
    losses = [dict(line) for line in found.arms[-1].losses]
    value = float.fromhex(losses[50]["losses"]["lm loss"])
    losses[50]["losses"] = {"lm loss": math.nextafter(value, 9.0).hex()}
    return replace(found, arms=[*found.arms[:-1], replace(found.arms[-1], losses=losses)])


def study(case: Case = FREEZING) -> Study:
    uniform, ours = ["Et*6|t*6L"] * 120, ["Et*6|t*6L"] * 35 + ["Et*8|t*4L"] * 85
    changes = [{"iteration": 30, "family": "freeze", "what": "layers 0-2, 9 frozen", "changes_costs": True}]
    move = {"iteration": 35, "outcome": "commit", "layout_before": "Et*6|t*6L", "layout_after": "Et*8|t*4L"}
    arms = [
        record(UNIFORM, uniform, 2.0),
        record(PARAMETERS, uniform, 2.0),
        record(HINDSIGHT, ["Et*8|t*4L"] * 120, 1.6),
        record(OURS, ours, 1.0, rounds=[move | {"moving_seconds": 0.25}], changes=changes),
    ]
    profile = record("profile", uniform, 2.5, rounds=frozen_rounds(), changes=changes)
    return Study(
        case=case.name, machine="a machine", profile=profile, arms=arms, curves={"expected": [[3.0] * 12] * 4}, table=[]
    )
