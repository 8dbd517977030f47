"""Where the sources are, for the contract tests.

Collaborators: every test in this folder. It must not import megatron_dyn: contracts are read from the source text, so
that they hold for code that cannot be imported on this machine and cost no import of torch.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_dyn"
STAGES = ("measure", "plan", "migrate", "rebuild", "report")


def python_files(*folders: Path) -> list[Path]:
    """List every Python file below the folders, sorted; a folder that is not there yet holds none."""
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


def parse(path: Path) -> ast.Module:
    """Parse one file; a syntax error names it."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield (qualified name, node) of every function in a module, methods and nested functions included."""
    for node in ast.iter_child_nodes(tree):
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        name = f"{prefix}{node.name}" if named else prefix
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        yield from functions(node, f"{name}." if named else prefix)
