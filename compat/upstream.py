"""Megatron-LM's own unit tests with the plugin: stock, installed and off, and on must end in the same way, test by test.

    python -m compat.upstream /path/to/Megatron-LM      (or: make test-upstream MEGATRON_LM=/path/to/Megatron-LM)

Which tests is data (upstream.toml). They run in the checkout with its `megatron/`, each time in a process of its own;
`upstream_plugin` does the installing, `outcomes` the comparing. Nothing is written into the checkout.
"""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from rich.console import Console
from rich.table import Table

from compat.outcomes import Outcomes, describe, differences, read_outcomes, shortfalls

ROOT = Path(__file__).resolve().parents[1]
ALLOW_LIST = ROOT / "compat" / "upstream.toml"
PLUGIN = "compat.upstream_plugin"
MODES = ("stock", "off", "on")
TIMEOUT_SECONDS = 900.0
TEST_TIMEOUT_SECONDS = 60.0
ENVIRONMENT = {
    # The version must not depend on whether the checkout has its git directory.
    "NO_VCS_VERSION": "1",
    # Megatron's conftest would download test data, and tokenizers models, that none of these tests needs.
    "https_proxy": "http://127.0.0.1:9",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}


class UpstreamError(ValueError):
    """The tests cannot be run or compared; the message is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowList:
    """The tests to run."""

    release: str
    """Release (major.minor) of the checkout they are taken from."""
    folder: str
    """Where they are, relative to the checkout."""
    passed: Mapping[str, int]
    """By test file, relative to the checkout: how many of its tests pass in the stock run, at least."""


def main(argv: Sequence[str], *, allow_list: Path = ALLOW_LIST, plugin: str = PLUGIN, out: Path = ROOT / "build") -> int:
    """Compare the three runs in the checkout `argv[0]` and print a table; the rest of `argv` goes to pytest.

    Returns the exit code: 0 for equal, 1 for different, 2 where it could not be found out. The logs go to `out`/upstream.
    """
    console = Console(soft_wrap=True, highlight=False)
    checkout, *arguments = argv
    try:
        allowed = read_allow_list(allow_list)
        runs = run_all(check_checkout(Path(checkout), allowed), [*allowed.passed, *arguments], plugin, out / "upstream")
    except UpstreamError as error:
        console.print(f"test-upstream: error: {error}", markup=False)
        return 2
    console.print(table(runs, allowed))
    complaints = [f"stock: {line}" for line in shortfalls(runs["stock"], allowed.passed)]
    for mode in MODES[1:]:
        complaints += [f"{mode}: {line}" for line in differences(runs["stock"], runs[mode])]
    for line in complaints:
        console.print(f"test-upstream: error: {line}", markup=False)
    if not complaints:
        console.print(f"{len(runs['stock'].by_test)} tests of Megatron-LM end in the same way: {', '.join(MODES)}")
    return 1 if complaints else 0


def read_allow_list(path: Path) -> AllowList:
    """Read the allow-list, a TOML file with `release`, `folder` and `[passed]`."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    folder = data["folder"]
    return AllowList(
        release=data["release"], folder=folder, passed={f"{folder}/{file}": count for file, count in data["passed"].items()}
    )


def check_checkout(checkout: Path, allowed: AllowList) -> Path:
    """Return the absolute path of a checkout of the right release. Raises UpstreamError for anything else."""
    checkout = checkout.expanduser().resolve()
    info = checkout / "megatron" / "core" / "package_info.py"
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = [match[1] if (match := re.search(rf"^{part} = (\d+)", text, re.MULTILINE)) else "?" for part in ("MAJOR", "MINOR")]
    if not text:
        raise UpstreamError(f"MEGATRON_LM: expected a checkout of Megatron-LM, actual {checkout}: no {info}")
    if ".".join(found) != allowed.release:
        expected = f"expected a checkout of release {allowed.release} (tag core_v{allowed.release}.0)"
        raise UpstreamError(f"MEGATRON_LM: {expected}, actual {'.'.join(found)} in {checkout}")
    if missing := [file for file in allowed.passed if not (checkout / file).exists()]:
        raise UpstreamError(f"MEGATRON_LM: expected the test files of the allow-list, missing in {checkout}: {missing}")
    return checkout


def run_all(checkout: Path, arguments: Sequence[str], plugin: str, out: Path) -> dict[str, Outcomes]:
    """Run the tests once in each mode. Raises UpstreamError where a run does not get to its end."""
    out.mkdir(parents=True, exist_ok=True)
    return {mode: run_one(mode, checkout, arguments, plugin, out) for mode in MODES}


def run_one(mode: str, checkout: Path, arguments: Sequence[str], plugin: str, out: Path) -> Outcomes:
    """Run the tests in one mode and return how they ended."""
    log, junit, record = (out / f"{mode}.{suffix}" for suffix in ("log", "xml", "json"))
    for path in (junit, record):
        path.unlink(missing_ok=True)
    options = [] if mode == "stock" else ["-p", plugin, "--dyn-mode", mode, "--dyn-record", str(record)]
    options += ["-q", "-o", "addopts=", "-o", "junit_family=xunit1", "--junitxml", str(junit), "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "--timeout", str(TEST_TIMEOUT_SECONDS), *arguments]
    paths = {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}", "PYTHONPYCACHEPREFIX": str(out / "pycache")}
    environment = {**os.environ, **ENVIRONMENT, **paths}
    try:
        with log.open("w", encoding="utf-8") as file:
            code = subprocess.run(
                command, cwd=checkout, env=environment, stdout=file, stderr=file, check=False, timeout=TIMEOUT_SECONDS
            ).returncode
        if code not in (0, 1):
            raise UpstreamError(f"{mode}: expected pytest to end with exit code 0 or 1, actual {code}; see {log}")
        if mode != "stock":
            check_record(mode, json.loads(record.read_text(encoding="utf-8")), checkout)
        return read_outcomes(junit)
    except subprocess.TimeoutExpired as error:
        raise UpstreamError(f"{mode}: expected to end within {TIMEOUT_SECONDS:.0f} s; see {log}") from error
    except (OSError, ValueError, ElementTree.ParseError) as error:
        raise error if isinstance(error, UpstreamError) else UpstreamError(f"{mode}: {error}; see {log}") from error


def check_record(mode: str, record: Mapping[str, object], checkout: Path) -> None:
    """Raise UpstreamError unless the run had the plugin in the mode asked for, all the time, in the checkout's Megatron."""
    rows, lost, megatron = record["rows"], record["lost"], str(record["megatron"])
    if record["mode"] != mode or bool(rows) != (mode == "on") or lost:
        raise UpstreamError(f"{mode}: expected rows of the ledger in force only when on, actual {rows}, lost {lost}")
    if not Path(megatron).is_relative_to(checkout):
        raise UpstreamError(f"{mode}: expected the Megatron of {checkout}, actual {megatron}")


def table(runs: Mapping[str, Outcomes], allowed: AllowList) -> Table:
    """The counts of the stock run by file and in all; of the others where they are not the same."""

    def row(name: str, file: str | None, expected: int) -> list[str]:
        stock, *others = (runs[mode].counts(file) for mode in MODES)
        return [name, str(expected), describe(stock), *("same" if other == stock else describe(other) for other in others)]

    found = Table(title="Megatron-LM's own tests", title_justify="left")
    for column in ("file", "to pass", *MODES):
        found.add_column(column, overflow="fold")
    for file, expected in allowed.passed.items():
        found.add_row(*row(file.removeprefix(f"{allowed.folder}/"), file, expected))
    found.add_section()
    found.add_row(*row("in all", None, sum(allowed.passed.values())))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
