"""Habits that a reader can rely on, each seen to rot a codebase of this kind: checked on the syntax tree.

Collaborators: source_tree. ruff covers part of this; a `noqa` silences ruff and must not silence these.
"""

import ast
import re
from pathlib import Path

import pytest

from tests.contract.source_tree import PACKAGE, ROOT, parse, python_files

# Only here may code ask the host for its global arguments: everywhere else they would be a hidden data bus.
KNOWS_THE_HOST = ("host", "dynamics")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")


def calls_print(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Call) and is_named(node.func, "print") for node in ast.walk(tree))


def has_global(tree: ast.Module) -> bool:
    return any(isinstance(node, ast.Global) for node in ast.walk(tree))


def asks_for_global_arguments(tree: ast.Module) -> bool:
    """Whether `get_args` is imported or called; typing's function of that name is another one."""
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=aliases) if module != "typing":
                if any(alias.name == "get_args" for alias in aliases):
                    return True
            case ast.Attribute(value=value, attr="get_args") if not is_named(value, "typing"):
                return True
    return False


def is_named(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def complaints(path: Path, package: Path) -> list[str]:
    """What is wrong with one file of the package."""
    tree, text, inside = parse(path), path.read_text(encoding="utf-8"), path.relative_to(package)
    found = {
        "calls print; log or report instead": calls_print(tree),
        "uses `global`; pass an instance instead": has_global(tree),
        "asks for the global arguments": asks_for_global_arguments(tree) and inside.parts[0] not in KNOWS_THE_HOST,
        "is called utils; name it after what it does": "utils" in (*inside.parent.parts, inside.stem),
        "is unfinished": UNFINISHED.search(text) is not None,
    }
    return [what for what, seen in found.items() if seen]


def test_package_is_clean():
    found = {path.relative_to(ROOT).as_posix(): complaints(path, PACKAGE) for path in python_files(PACKAGE)}
    assert {path: what for path, what in found.items() if what} == {}


def test_sources_are_ascii():
    folders = [PACKAGE, ROOT / "examples", ROOT / "benchmarks", ROOT / "compat", ROOT / "tests"]
    strange = [path for path in python_files(*folders) if not path.read_bytes().isascii()]
    assert [path.relative_to(ROOT).as_posix() for path in strange] == []


@pytest.mark.parametrize(
    ("name", "source", "expected"),
    [
        ("plan/a.py", "print('x')  # noqa: T201", "print"),
        ("plan/a.py", "def f():\n  global x\n  x = 1", "global"),
        ("plan/a.py", "from megatron.training import get_args", "global arguments"),
        ("install.py", "import megatron.training as m\nm.global_vars.get_args()", "global arguments"),
        ("plan/utils.py", "", "utils"),
        ("utils/a.py", "", "utils"),
        ("plan/a.py", "# TODO: more", "unfinished"),
        ("host/a.py", "from megatron.training import get_args", ""),
        ("plan/a.py", "from typing import get_args\nimport typing\ntyping.get_args(int)", ""),
        ("plan/a.py", "def pprint(log): log.print('x')", ""),
    ],
)
def test_the_check_can_fail(tmp_path, name, source, expected):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
    found = complaints(path, tmp_path)
    assert (found == []) if not expected else (len(found) == 1 and expected in found[0])
