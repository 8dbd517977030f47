"""The page of results: one section a family, tables in Markdown. Pure; a section is replaced without touching the others."""

import re
from collections.abc import Sequence
from itertools import groupby

from benchmarks.dynamics.arms import HINDSIGHT, NUM_STAGES, OURS, Record, Study
from benchmarks.dynamics.cases import CASES, Case
from benchmarks.dynamics.costs import bound_seconds, group_seconds, imbalance, points_of, trace_of
from megatron_dyn.testing.training import tiny_gpt_arguments

HEADER = """# The dynamic families at work

Written by `python -m benchmarks.dynamics` (also `make bench ARGS=dynamics`); the next run replaces what is between the
markers. All runs: two pipeline stages, one thread each, gloo on one host. The four arms of a family start from one checkpoint
and see the same data, one run after the other. Only ours may move layers; it samples and decides by itself. Tokens per second
are those of the whole run with everything in it: rounds, moves, what the family does at a boundary. The bound is a 1F1B step of
the measured layers if they could be cut at will, so that both stages were alike; optimizer and transport are not in it.
"""


def empty_page() -> str:
    """The page before any run."""
    return HEADER + "".join(f"\n<!-- family: {name} -->\n<!-- end: {name} -->\n" for name in CASES)


def with_section(page: str, name: str, section: str) -> str:
    """`page` with the section of one family replaced; raises ValueError without its markers."""
    pattern = re.compile(rf"(<!-- family: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(page):
        raise ValueError(f"no section <!-- family: {name} --> found")
    return pattern.sub(lambda match: match.group(1) + section + match.group(2), page)


def section(case: Case, study: Study) -> str:
    """Everything about one family. Raises ValueError for a study without a measured round."""
    flags = " ".join(_quoted(word) for word in _words(case))
    parts = [
        f"## {case.title[:1].upper()}{case.title[1:]}",
        f"![layers, steps and losses](images/dynamics-{case.name}.svg)",
        f"{case.what} Flags: `{flags}`.",
        f"Machine: {study.machine}. {_repeats(study)}",
        table(
            ["arm", "layouts", "mean step", "tokens/s", "against uniform", "step / bound", "slowest / mean stage"],
            _arms(case, study),
        ),
        _equality(study),
        table(["after step", "what changed"], _events(study)),
        f"Milliseconds of a layer per micro-batch, measured at the uniform split{_curve_names(study)}:",
        table(["steps", *case.groups, "head"], _layers(case, study)),
    ]
    if study.table:
        parts += ["Kernels alone, one thread, all three products of a weight:", table(study.table[0], study.table[1:])]
    return "\n\n".join([*parts, *(f"- {remark}" for remark in case.remarks)]) + "\n"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; bars inside of cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _repeats(study: Study) -> str:
    return (
        "One run of each arm."
        if study.num_repeats == 1
        else f"The fastest of {study.num_repeats} runs of each arm, taken in turn."
    )


def _words(case: Case) -> list[str]:
    """The family's own flags as a user would type them."""
    everything = tiny_gpt_arguments(**case.family)
    return everything[len(tiny_gpt_arguments()) :]


def _quoted(word: str) -> str:
    return f"'{word}'" if re.search(r"[^\w:./=,-]", word) else word


def _arms(case: Case, study: Study) -> list[list[str]]:
    trace = trace_of(points_of(study.profile.rounds, case.every_steps), case.num_steps)
    bound = sum(bound_seconds(trace, NUM_STAGES))
    totals = [sum(arm.lap_seconds) for arm in study.arms]
    return [
        [
            arm.name,
            _layout_history(arm),
            f"{total / case.num_steps:.3f} s",
            f"{case.tokens_per_step * case.num_steps / total:,.0f}",
            f"{totals[0] / total:.2f}",
            f"{total / bound:.2f}",
            f"{imbalance(trace, arm.layouts):.2f}",
        ]
        for arm, total in zip(study.arms, totals, strict=True)
    ]


def _layout_history(arm: Record) -> str:
    """Each layout once, with the first step of all but the first."""
    step, parts = 1, []
    for layout, steps in groupby(arm.layouts):
        parts.append(f"`{layout}`" + (f" from step {step}" if step > 1 else ""))
        step += len(list(steps))
    return ", ".join(parts)


def _equality(study: Study) -> str:
    num_steps = len(study.profile.losses)
    if study.equal:
        return (
            f"Losses and gradient norms of all {num_steps} steps are equal in every bit in the four arms: the moves change "
            "nothing."
        )
    different = [arm.name for arm in study.arms if arm.numbers != study.profile.numbers]
    return f"Losses or gradient norms DIFFER from those of the profiled run in: {', '.join(different)}."


def _events(study: Study) -> list[list[str]]:
    """What the family did, and where our arm moved layers, in order."""
    ours = study.arms[-1]
    events = [(line["iteration"], 0, f"{line['family']}: {line['what']}") for line in ours.changes if line["changes_costs"]]
    events += [
        (
            line["iteration"],
            1,
            f"moved: `{line['layout_before']}` to `{line['layout_after']}` in {line['moving_seconds']:.2f} s",
        )
        for line in ours.rounds
        if line["outcome"] == "commit"
    ]
    return [[str(step), text] for step, _, text in sorted(events)]


def _curve_names(study: Study) -> str:
    names = [f"expected {name}" if name != "expected" else name for name in study.curves]
    return f" (in brackets: {', '.join(names)})" if names else ""


def _layers(case: Case, study: Study) -> list[list[str]]:
    rows, start = [], 1
    for index, point in enumerate(points_of(study.profile.rounds, case.every_steps)):
        cells = []
        for ids in case.groups.values():
            expected = ", ".join(f"{1e3 * group_seconds(curve[index], ids):.1f}" for curve in study.curves.values())
            measured = 1e3 * group_seconds([cost.seconds for cost in point.layers], ids)
            cells.append(f"{measured:.1f}" + (f" ({expected})" if expected else ""))
        rows.append([f"{start}-{point.step}", *cells, f"{1e3 * point.head.seconds:.1f}"])
        start = point.step + 1
    return rows


def summary(case: Case, study: Study) -> list[str]:
    """One row for the console: what ours gained over uniform and over the best static split in hindsight."""
    totals = {arm.name: sum(arm.lap_seconds) for arm in study.arms}
    against = [f"{totals[name] / totals[OURS]:.2f}" for name in (study.arms[0].name, HINDSIGHT)]
    return [case.name, f"{totals[OURS] / case.num_steps:.3f} s", *against, "yes" if study.equal else "NO"]
