"""The public names: every package says in `__all__` what it offers, and offers nothing else.

Collaborators: source_tree. Packages are read as text, since importing the host's takes many seconds. Only the root,
whose names may be lazy, is really imported, in an interpreter of its own and with stand-ins for all of its submodules.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source_tree import PACKAGE, ROOT, parse

# Imports the root with stand-ins that answer any name and note who asked for what. The import system itself is the real
# one: loading `megatron_dyn.install` binds that module in the root, over a lazy function of the same name.
DESCRIBE_ROOT = """
import importlib, importlib.abc, importlib.machinery, json, sys, types

asked = {}

class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("megatron_dyn."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        def answer(name, home=module.__name__):
            if name.startswith("__"):
                raise AttributeError(name)
            asked[name] = home
            return object()
        module.__getattr__ = answer

sys.meta_path.insert(0, StandIns())
import megatron_dyn as package

is_module = lambda name: isinstance(vars(package).get(name), types.ModuleType)
public = sorted(name for name in dir(package) if not name.startswith("_") and not is_module(name))
shadowed = []
for name in package.__all__:
    if name in sys.argv[1:]:
        importlib.import_module(f"megatron_dyn.{name}")
    if isinstance(getattr(package, name), types.ModuleType):
        shadowed.append(name)
print(json.dumps({"all": list(package.__all__), "public": public, "shadowed": shadowed, "homes": asked}))
"""


def bound_names(tree: ast.Module) -> set[str]:
    """Names that the top level of a module binds by import, assignment or definition."""
    names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names |= {alias.asname or alias.name.partition(".")[0] for alias in aliases}
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.TypeAlias(name=ast.Name(id=name)) | ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    return names


def declared_names(tree: ast.Module) -> list[str] | None:
    """The literal value of `__all__`, or None when the module has none."""
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))
    return None


def complaints(tree: ast.Module) -> list[str]:
    """What is wrong with the `__all__` of one package."""
    declared = declared_names(tree)
    own_imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and is_own(node)]
    if declared is None:
        return ["imports names from this package but has no __all__"] if own_imports else []
    bound = bound_names(tree)
    reexported = {alias.asname or alias.name for node in own_imports for alias in node.names}
    found = [f"__all__ names {name}, which is not there" for name in declared if name not in bound]
    if "__getattr__" in bound:
        found = []
    if declared != sorted(set(declared)):
        found.append(f"__all__ is not sorted; expected {sorted(set(declared))}")
    leaked = sorted(name for name in reexported - set(declared) if not name.startswith("_"))
    return found + [f"{name} is imported in public but is not in __all__" for name in leaked]


def is_own(node: ast.ImportFrom) -> bool:
    return node.level > 0 or (node.module or "").partition(".")[0] == PACKAGE.name


def test_every_package_declares_what_it_offers():
    packages = sorted(PACKAGE.rglob("__init__.py"))
    found = {path.relative_to(ROOT).as_posix(): complaints(parse(path)) for path in packages}
    assert {path: what for path, what in found.items() if what} == {}


def describe_root(root: Path) -> dict:
    """Import the package below a folder and say what its root lists, offers and resolves."""
    submodules = [path.stem for path in (root / PACKAGE.name).iterdir()]
    command = [sys.executable, "-c", DESCRIBE_ROOT, *submodules]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"a name in megatron_dyn.__all__ does not resolve:\n{done.stderr}"
    return json.loads(done.stdout)


def source_of(module: str, root: Path) -> Path:
    path = root.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def check_root(root: Path) -> None:
    """Compare the imported root of the package below a folder with its own `__all__`."""
    described = describe_root(root)
    assert described["all"] == sorted(described["all"])
    assert described["public"] == described["all"]
    absent = {
        f"{home}.{name}"
        for name, home in described["homes"].items()
        if not source_of(home, root).exists() or name not in bound_names(parse(source_of(home, root)))
    }
    assert absent == set()
    assert described["shadowed"] == [], "importing the submodule hides the name: import it eagerly, or rename one"


def test_public_api_is_what_the_root_declares():
    check_root(ROOT)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from .a import x, y\n__all__ = ['x', 'y']", ""),
        ("from .a import x, y\n__all__ = ['y', 'x']", "not sorted"),
        ("from .a import x\n__all__ = ['x', 'y']", "not there"),
        ("from .a import x, y\n__all__: list[str] = ['x']", "not in __all__"),
        ("from megatron_dyn.a import x", "no __all__"),
        ("'''Nothing to offer.'''", ""),
        ("def __getattr__(name): ...\n__all__ = ['lazy']", ""),
    ],
)
def test_the_check_of_a_package_can_fail(source, expected):
    found = complaints(ast.parse(source))
    assert (found == []) if not expected else any(expected in what for what in found)


LAZY = """
from importlib import import_module as _load
__all__ = list(_HOMES)
def __dir__(): return __all__
def __getattr__(name):
    if name not in _HOMES: raise AttributeError(name)
    return globals().setdefault(name, getattr(_load(_HOMES[name]), name))
"""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from .install import install\n__all__ = ['install']\n", None),
        ("_HOMES = {'Lazy': 'megatron_dyn.config'}" + LAZY, None),
        ("from os import getcwd\n__all__ = []\n", "getcwd"),
        ("__all__ = ['absent']\n", "absent"),
        ("from .install import absent\n__all__ = ['absent']\n", "megatron_dyn.install.absent"),
        ("from .absent import install\n__all__ = ['install']\n", "megatron_dyn.absent.install"),
        ("_HOMES = {'install': 'megatron_dyn.install'}" + LAZY, "hides"),
    ],
    ids=["eager", "lazy", "leak", "unbound", "not-in-module", "no-module", "module-over-function"],
)
def test_the_check_of_the_root_can_fail(tmp_path, source, expected):
    package = tmp_path / PACKAGE.name
    package.mkdir()
    (package / "__init__.py").write_text(source)
    (package / "install.py").write_text("def install(): ...\n")
    (package / "config.py").write_text("class Lazy: ...\n")
    if expected is None:
        check_root(tmp_path)
    else:
        with pytest.raises(AssertionError, match=expected):
            check_root(tmp_path)
