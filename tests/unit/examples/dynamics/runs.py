"""What a run of 12 steps leaves behind: layers freeze after step 4, one moves after step 6."""

import json
from pathlib import Path

LOG_LINE = " [2026-12-01] iteration {step:8}/      12 | elapsed time per iteration (ms): {ms:.1f} | lm loss: 5.0E+00 |\n"


def write_run(folder: Path, *, family: str = "freeze") -> tuple[Path, Path]:
    """Report folder and log."""
    report, log = folder / "report", folder / "train.log"
    report.mkdir(parents=True)
    layouts = ["Et*2|t*2L"] * 6 + ["Et*3|tL"] * 6
    losses = [
        {"iteration": step, "losses": {"lm loss": (6.0 - step / 10).hex()}, "grad_norm": None, "layout": layout}
        for step, layout in enumerate(layouts, 1)
    ]
    layers = [{"layer": i, "forward_seconds": 0.01, "backward_seconds": 0.0 if i < 2 else 0.02} for i in range(4)]
    move = {
        "iteration": 6,
        "outcome": "commit",
        "reason": "pays",
        "layout_before": layouts[0],
        "layout_after": layouts[-1],
        "moves": [{"layer": 2, "from": 1, "to": 0}],
        "measured_before_seconds": 0.4,
        "measured_after_seconds": 0.3,
        "moving_seconds": 0.5,
        "layers": layers,
    }
    told = [
        {"iteration": 4, "family": family, "what": "layers 0-1 frozen", "changes_costs": True},
        {"iteration": 12, "family": family, "what": "nothing that costs", "changes_costs": False},
    ]
    for name, lines in (("losses", losses), ("rounds", [move]), ("dynamics", told)):
        (report / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    seconds = [0.6] * 4 + [0.4] * 2 + [0.9] + [0.3] * 5
    log.write_text("noise\n" + "".join(LOG_LINE.format(step=i, ms=1e3 * s) for i, s in enumerate(seconds, 1)))
    return report, log
