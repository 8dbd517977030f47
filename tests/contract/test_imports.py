"""What deciding and reporting drag in: a fresh interpreter imports them without torch and without megatron.

Collaborators: source_tree. import-linter reads the same rule from the text (test_layers); this one sees what really
happens, the package root and `importlib` calls included.
"""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source_tree import PACKAGE, ROOT, parse

HEAVY = ("megatron", "torch")
LIGHT_MODULES = ("config", "measure", "plan", "ports", "rebuild", "records", "report")

# Refuses the heavy packages instead of looking for them afterwards: the traceback names the import that asked, and a
# failing test does not take the half minute that importing megatron takes. An `except ImportError` hides nothing.
IMPORT_WITHOUT_HEAVY = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[2:]:
            print(name)
            raise ImportError(f"{sys.argv[1]} must not import {name}")

sys.meta_path.insert(0, Refuse())
importlib.import_module(sys.argv[1])
"""


def heavy_imports(module: str, path: Path) -> str:
    """Import a module in a fresh interpreter; return what it asked for in vain and why it failed, if it did."""
    command = [sys.executable, "-c", IMPORT_WITHOUT_HEAVY, module, *HEAVY]
    environment = {**os.environ, "PYTHONPATH": str(path)}
    done = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def existing(*names: str) -> list[str]:
    return [name for name in names if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()]


def imported_names(tree: ast.Module) -> set[str]:
    """Top-level packages that a module names in its imports; "" stands for a relative one."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name.partition(".")[0] for alias in aliases}
            case ast.ImportFrom(module=module, level=level):
                names.add("" if level else str(module).partition(".")[0])
    return names


@pytest.mark.parametrize("name", ["", *existing(*LIGHT_MODULES)])
def test_light_module_imports_neither_torch_nor_megatron(name):
    assert heavy_imports(f"megatron_dyn.{name}".rstrip("."), ROOT) == ""


@pytest.mark.parametrize("path", sorted((PACKAGE / "records").glob("*.py")), ids=lambda path: path.name)
def test_records_name_the_standard_library_and_each_other_only(path):
    assert imported_names(parse(path)) - sys.stdlib_module_names <= {PACKAGE.name}
    assert set(re.findall(r"from megatron_dyn\.(\w+)", path.read_text())) <= {"records"}


@pytest.mark.parametrize("heavy", HEAVY)
@pytest.mark.parametrize("guard", ["", "try: importlib.import_module('{}')\nexcept ImportError: pass\n"])
def test_the_check_can_fail(tmp_path, heavy, guard):
    """Two steps away, and also where the failure is swallowed."""
    package = tmp_path / "planted"
    package.mkdir()
    (package / "__init__.py").write_text("import planted.inner\n")
    line = guard.format(heavy) or f"importlib.import_module('{heavy}')\n"
    (package / "inner.py").write_text(f"import importlib\n{line}")
    found = heavy_imports("planted", tmp_path)
    assert found.startswith(f"{heavy}\n")
    assert ("planted must not import" in found) == (not guard)


def test_a_light_module_passes(tmp_path):
    (tmp_path / "planted.py").write_text("import json\n")
    assert heavy_imports("planted", tmp_path) == ""


def test_the_check_of_the_text_can_fail():
    tree = ast.parse("import numpy.linalg\nfrom rich import table\nfrom . import config\nimport json")
    assert imported_names(tree) - sys.stdlib_module_names == {"numpy", "rich", ""}
