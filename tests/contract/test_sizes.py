"""Size budgets: a file, a function and a parameter list stay small enough to be read in one go.

Collaborators: source_tree. About 300 lines a file and 40 a function is what we aim for; only the hard limits fail.
"""

import ast
from pathlib import Path

import pytest

from tests.contract.source_tree import PACKAGE, ROOT, functions, parse, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_ENTRY_LINES = 149

# "path" or "path::Class.function" -> the reason why the limit would make the code worse.
EXCEPTIONS: dict[str, str] = {}

SOURCES = (PACKAGE, ROOT / "examples", ROOT / "benchmarks", ROOT / "compat", ROOT / "tests")


def num_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def num_parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters a caller can name; self, cls, *args and **kwargs are none."""
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def too_large(path: Path, root: Path) -> dict[str, str]:
    """Map every name in the file that is over a limit to what it measures."""
    where = path.relative_to(root).as_posix()
    found = {}
    if num_lines(path) > MAX_FILE_LINES:
        found[where] = f"{num_lines(path)} lines, at most {MAX_FILE_LINES}"
    for name, node in functions(parse(path)):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > MAX_FUNCTION_LINES:
            found[f"{where}::{name}"] = f"{lines} lines, at most {MAX_FUNCTION_LINES}"
        elif num_parameters(node) > MAX_PARAMETERS:
            found[f"{where}::{name}"] = f"{num_parameters(node)} parameters, at most {MAX_PARAMETERS}"
    return found


def test_sources_are_within_the_limits_and_every_exception_is_still_needed():
    found = {name: what for path in python_files(*SOURCES) for name, what in too_large(path, ROOT).items()}
    assert {name: what for name, what in found.items() if name not in EXCEPTIONS} == {}
    assert [name for name in EXCEPTIONS if name not in found] == [], "no longer over a limit: drop the exception"
    assert [name for name, reason in EXCEPTIONS.items() if not reason.strip()] == [], "an exception needs a reason"


def test_entry_script_is_thin():
    entry = ROOT / "pretrain_gpt_dynamic.py"
    if entry.exists():
        assert num_lines(entry) <= MAX_ENTRY_LINES


SIGNATURE = ", ".join(f"argument_{i}" for i in range(MAX_PARAMETERS + 1))
LONG_BODY = "    pass\n" * MAX_FUNCTION_LINES


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("\n" * (MAX_FILE_LINES + 1), ["planted.py"]),
        ("\n" * MAX_FILE_LINES, []),
        (f"def long():\n{LONG_BODY}", ["planted.py::long"]),
        (f"class Outer:\n  async def long(self):\n{LONG_BODY}", ["planted.py::Outer.long"]),
        (f"def wide({SIGNATURE}): ...", ["planted.py::wide"]),
        (f"def wide(*, {SIGNATURE}): ...", ["planted.py::wide"]),
        ("class C:\n  def fits(self, a, b, c, d, e, f, g, *args, **kwargs): ...", []),
        (f"if True:\n  def outer():\n    def wide({SIGNATURE}): ...", ["planted.py::outer.wide"]),
    ],
)
def test_the_check_can_fail(tmp_path, source, expected):
    path = tmp_path / "planted.py"
    path.write_text(source)
    assert list(too_large(path, tmp_path)) == expected
