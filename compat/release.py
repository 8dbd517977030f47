"""One older release of Megatron-core: the core of the test matrix, then the quickstart, in the environment this runs in.

    .venv-0.17/bin/python -m compat.release 0.17        (or, for every release: make test-compat)

That the release is the intended one is a test of that core; which version it has to be stands in the lock file that the
environment was made from.
"""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
NUM_STEPS = 20
"""Enough for one round: the window of the quickstart is full after step 10."""


def main(argv: Sequence[str]) -> int:
    """Test the release `argv[0]`, such as `0.17`; the rest goes to pytest. Returns the exit code: 0 when all passed."""
    release, *arguments = argv
    console = Console(soft_wrap=True, highlight=False)
    version = pinned_version(release)
    console.rule(f"megatron-core {version}")
    command = [sys.executable, "-m", "pytest", "-q", "-m", "core_matrix", *arguments]
    if code := subprocess.run(command, cwd=ROOT, env={**os.environ, "MEGATRON_UNDER_TEST": version}, check=False).returncode:
        console.print(f"test-compat: error: megatron-core {version}: pytest ended with exit code {code}")
        return code
    if complaint := run_quickstart(ROOT / "build" / f"quickstart-{release}"):
        console.print(f"test-compat: error: megatron-core {version}: quickstart: {complaint}")
        return 1
    console.print(f"megatron-core {version}: the core of the matrix and the quickstart passed")
    return 0


def pinned_version(release: str, folder: Path = ROOT / "compat") -> str:
    """Return the version that the lock file of a release pins. Raises ValueError where there is none."""
    path = folder / f"megatron-core-{release}.lock"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    pins = re.findall(r"^megatron-core==(\S+)", text, re.MULTILINE)
    if len(pins) != 1 or not pins[0].startswith(f"{release}."):
        raise ValueError(f"{path}: expected one pin of megatron-core {release}, actual {pins}")
    return str(pins[0])


def run_quickstart(out: Path) -> str | None:
    """Run the quickstart, shortened, with its files in `out`, and return what was wrong; None when nothing was."""
    picture = out / "quickstart.svg"
    picture.unlink(missing_ok=True)
    command = [sys.executable, "examples/quickstart/run.py", "--steps", str(NUM_STEPS), "--out", str(out)]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    return quickstart_complaint(code, out)


def quickstart_complaint(code: int, out: Path) -> str | None:
    """Return why a quickstart that ended with `code` and left its files in `out` did not do all of its work, or None."""
    # 1 is also "the step did not become faster", and a busy machine must not fail a test. The picture comes last.
    if code not in (0, 1) or not (out / "quickstart.svg").exists():
        return f"expected it to run to its end, actual exit code {code}; see {out / 'train.log'}"
    for name, num_expected in (("losses.jsonl", NUM_STEPS), ("rounds.jsonl", 1)):
        path = out / "report" / name
        num_lines = len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0
        if num_lines < num_expected:
            return f"{path}: expected at least {num_expected} lines, actual {num_lines}"
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
