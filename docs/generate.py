"""Writes the generated parts of the documentation: flags, support matrix, limits, the patch ledger, timing files.

python -m docs.generate            rewrite the marked blocks in place
python -m docs.generate --check    exit 1 when a block is out of date (what the contract test does)
"""

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.distributed.matrix import Case

ROOT = Path(__file__).resolve().parents[1]


def flags_table() -> str:
    """Every `--dyn-*` flag as the parser knows it."""
    from megatron_dyn.args import add_dyn_args

    parser = add_dyn_args(argparse.ArgumentParser(add_help=False))
    rows = ["| flag | what it does |", "|---|---|"]
    for action in parser._actions:
        value = f" {action.metavar or '|'.join(action.choices or ())}" if action.nargs != 0 else ""
        text = (action.help or "") % {"default": action.default, "choices": ", ".join(map(str, action.choices or ()))}
        rows.append(f"| `{' / '.join(action.option_strings)}{value.replace('|', chr(92) + '|')}` | {text} |")
    return "\n".join(rows)


def limits_table() -> str:
    """What is refused while layers may move."""
    from megatron_dyn.host.support import LIMITS

    rows = ["| refused with `--dyn-rebalance` or `--dyn-layout-at` | flag |", "|---|---|"]
    return "\n".join([*rows, *(f"| {limit.what} | `{limit.flag}` |" for limit in LIMITS)])


def matrix_table() -> str:
    """What a run with moves was compared with a run without under."""
    from tests.distributed.matrix import CASES, GRID

    columns = list(dict.fromkeys(case.what for case in GRID))
    rows = [f"| ranks | {' | '.join(columns)} |", "|---|" + "---|" * len(columns)]
    for ranks in dict.fromkeys(case.topology.text for case in GRID):
        cells = [_cell(case) for case in GRID if case.topology.text == ranks]
        rows.append(f"| {ranks} | {' | '.join(cells)} |")
    rows += ["", "| ranks | what | test |", "|---|---|---|"]
    rows += [f"| {case.topology.text} | {case.what} | {_cell(case)} |" for case in CASES if case not in GRID]
    return "\n".join(rows)


def _cell(case: "Case") -> str:
    return f"`{case.name}`" + (" (core)" if case.core else "")


def refusals_table() -> str:
    """What ends the job at start, with the words it ends with."""
    from megatron_dyn.host.support import LIMITS, refusal

    rows = ["| refused | message (after `megatron_dyn: error: `) |", "|---|---|"]
    return "\n".join([*rows, *(f"| {limit.what} | `{refusal([limit])}` |" for limit in LIMITS)])


def ledger_tables() -> str:
    """Every seam with why and when it goes."""
    from megatron_dyn.host.ledger import ledger

    parts = []
    for when, seams in ledger().items():
        parts.append(f"### In force {when}\n\n| target | why | remove when |\n|---|---|---|")
        parts[-1] += "".join(f"\n| `{seam.target}` | {seam.why} | {seam.remove_when} |" for seam in seams)
    return "\n\n".join(parts)


def timing_fields_table() -> str:
    """Every field of a timing file as its schema knows it."""
    from megatron_dyn.cli.timing_schema import field_rows

    rows = ["| field | type | meaning |", "|---|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {kind} | {meaning} |" for name, kind, meaning in field_rows())])


BLOCKS: dict[str, tuple[str, Callable[[], str]]] = {
    "flags": ("README.md", flags_table),
    "limits": ("README.md", limits_table),
    "matrix": ("docs/support.md", matrix_table),
    "refusals": ("docs/support.md", refusals_table),
    "ledger": ("docs/seams.md", ledger_tables),
    "timing-fields": ("docs/timing-files.md", timing_fields_table),
}


def render(name: str, text: str, content: str) -> str:
    """`text` with the block `name` replaced; raises ValueError when the markers are missing."""
    pattern = re.compile(rf"(<!-- generated: {name} -->\n).*?(<!-- end: {name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"no block <!-- generated: {name} --> found")
    return pattern.sub(lambda match: match.group(1) + content + "\n" + match.group(2), text)


def outdated(*, write: bool) -> list[str]:
    """Names of blocks that are not what the code says; with `write` they are brought up to date."""
    found = []
    for name, (path, make) in BLOCKS.items():
        before = (ROOT / path).read_text(encoding="utf-8")
        after = render(name, before, make())
        if after != before:
            found.append(f"{path}: {name}")
            if write:
                (ROOT / path).write_text(after, encoding="utf-8")
    return found


if __name__ == "__main__":
    check = "--check" in sys.argv[1:]
    names = outdated(write=not check)
    sys.stdout.write("".join(f"{'out of date' if check else 'updated'}: {name}\n" for name in names))
    sys.exit(1 if check and names else 0)
