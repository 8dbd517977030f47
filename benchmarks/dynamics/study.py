"""From the names of families to runs, page and pictures."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.dynamics.arms import Study, measure
from benchmarks.dynamics.cases import CASES
from benchmarks.dynamics.page import empty_page, section, summary, with_section
from benchmarks.dynamics.picture import write_picture
from benchmarks.machine import describe, show

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "build" / "dynamics"
PAGE = ROOT / "docs" / "dynamics-results.md"
IMAGES = ROOT / "docs" / "images"


def run(names: Sequence[str] = tuple(CASES), *, redraw: bool = False, num_repeats: int = 1) -> None:
    """Measure the named families (with `redraw` take their last runs), write page and pictures, print a summary.

    Each arm runs `num_repeats` times, and its fastest run counts.
    SystemExit 1 where losses differ. Raises RankFailure where a run fails, OSError for a redraw without runs.
    """
    rows = []
    for name in names:
        case, store = CASES[name], STORE / f"{name}.json"
        study = Study.load(store) if redraw else measure(case, describe(), num_repeats)
        if not redraw:
            study.save(store)
        page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else empty_page()
        PAGE.write_text(with_section(page, name, section(case, study)), encoding="utf-8")
        write_picture(case, study, IMAGES / f"dynamics-{name}.svg")
        rows.append(summary(case, study))
    columns = ["family", "mean step of ours", "times as fast as uniform", "as the best static", "losses equal in every bit"]
    show("the dynamic families, PP 2", columns, rows)
    if any(row[-1] != "yes" for row in rows):
        raise SystemExit(1)
