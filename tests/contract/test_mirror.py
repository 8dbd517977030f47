"""Tests mirror the tree: whoever opens a module knows where its tests are, and that there are some.

Collaborators: source_tree. The stages and the top-level modules are mirrored; host/ is exercised by tests/distributed.
"""

from pathlib import Path

from tests.contract.source_tree import ROOT, STAGES

TOP_LEVEL_MODULES = ("args", "config", "controller", "records")


def missing_tests(root: Path) -> list[str]:
    """Test files that should exist below the root for the modules that do, sorted by module."""
    package, tests = root / "megatron_dyn", root / "tests" / "unit"
    modules = [path for stage in STAGES for path in sorted((package / stage).glob("*.py"))]
    modules += [package / f"{name}.py" for name in TOP_LEVEL_MODULES if (package / f"{name}.py").exists()]
    expected = [
        tests / path.relative_to(package).parent / f"test_{path.stem.lstrip('_')}.py"
        for path in modules
        if path.name != "__init__.py"
    ]
    return [path.relative_to(root).as_posix() for path in expected if not path.exists()]


def test_every_module_has_its_test_module():
    assert missing_tests(ROOT) == []


def test_the_check_can_fail(tmp_path):
    for name in ("plan/__init__.py", "plan/moves.py", "plan/_cost.py", "measure/window.py", "config.py", "install.py"):
        path = tmp_path / "megatron_dyn" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "tests" / "unit" / "plan").mkdir(parents=True)
    (tmp_path / "tests" / "unit" / "plan" / "test_moves.py").touch()
    assert missing_tests(tmp_path) == [
        "tests/unit/measure/test_window.py",
        "tests/unit/plan/test_cost.py",
        "tests/unit/test_config.py",
    ]
