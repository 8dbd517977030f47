"""The import contracts of pyproject.toml hold, and each of them breaks when it should.

Collaborators: import-linter, run as `make check` runs it; source_tree. Violations are planted in a copy.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source_tree import PACKAGE, ROOT

LAYERS = "Imports point one way"
MEGATRON = "Only host, dynamics and installer import megatron"
TORCH = "Deciding and reporting need no torch, not even indirectly"

# file to plant or to extend, the line that breaks a contract, the contract that breaks
VIOLATIONS = [
    ("plan/planted.py", "import megatron_dyn.migrate", LAYERS),
    ("records.py", "import megatron_dyn.plan", LAYERS),
    ("host/planted.py", "import megatron_dyn.controller", LAYERS),
    ("utils.py", "", LAYERS),
    ("migrate/planted.py", "import megatron.core", MEGATRON),
    ("testing/planted.py", "from megatron.core import parallel_state", MEGATRON),
    ("report/planted.py", "import torch.nn", TORCH),
]


def lint_imports(root: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("lint-imports"), "--no-logo", "--cache-dir", cache]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("lint-imports-cache")


@pytest.fixture(scope="module")
def copy_of_sources(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkout")
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copytree(PACKAGE, root / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_contracts_are_kept(cache):
    done = lint_imports(ROOT, cache)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("where", "line", "contract"), VIOLATIONS, ids=[f"{row[0]}:{row[1]}" for row in VIOLATIONS])
def test_planted_violation_breaks_its_contract(copy_of_sources, cache, where, line, contract):
    path = copy_of_sources / PACKAGE.name / where
    before = path.read_text() if path.exists() else None
    path.write_text(f"{before or ''}\n{line}\n")
    try:
        done = lint_imports(copy_of_sources, cache)
    finally:
        path.unlink() if before is None else path.write_text(before)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"{contract} BROKEN" in done.stdout
