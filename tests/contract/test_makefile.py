"""The commands a newcomer types: the targets exist, make .venv/ first, and find an interpreter that runs.

Collaborators: Makefile, scripts/bootstrap, .ci/run. Nothing is installed here; make only says what it would do.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.source_tree import ROOT

BOOTSTRAP = ROOT / "scripts" / "bootstrap"
NEEDS_VENV = {
    "venv": "touch .venv/.stamp",
    "quickstart": "examples/quickstart/run.py",
    "examples": "examples/dynamics/$name.py",
    "test": "-m pytest",
    "docs": "-m docs.generate",
    "check": "lint-imports",
    "bench": "-m benchmarks",
}
BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"
THIS_VERSION = ".".join(map(str, sys.version_info[:2]))


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Without the variables of a make that runs this suite: they would turn a dry run into its continuation.
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MAKELEVEL", "ARGS"}}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=30)


def find_python(home: Path, path: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run bootstrap with nothing of this machine in sight but what lies in /usr/local and /opt."""
    environment = {"HOME": str(home), "PATH": str(path), **variables}
    command = ["/bin/sh", str(BOOTSTRAP), "--find-python", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def working(path: Path) -> Path:
    return script(path, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')


@pytest.mark.parametrize("target", NEEDS_VENV)
def test_target_makes_the_environment_first(target):
    planned = make("--dry-run", "--always-make", target).stdout
    assert "scripts/bootstrap" in planned
    assert NEEDS_VENV[target] in planned
    assert planned.index("scripts/bootstrap") < planned.index(NEEDS_VENV[target])


def test_bare_make_lists_every_target():
    listed = {line.split()[1] for line in make().stdout.splitlines()}
    assert listed == {"help", "lock", "clean", "test-compat", "test-upstream", *NEEDS_VENV}


def test_older_releases_run_in_environments_of_their_own_made_first():
    planned = make("--dry-run", "--always-make", "test-compat").stdout
    for release in ("0.17", "0.18"):
        made = f"scripts/bootstrap --beside compat/megatron-core-{release}.lock .venv-{release}\n"
        assert made in planned
        assert f"touch .venv-{release}/.stamp" in planned
    assert planned.rindex("scripts/bootstrap") < planned.index("-m compat.release")
    assert re.search(r"for release in 0\.17 0\.18; do \.venv-\$release/bin/python -m compat\.release \$release", planned)


def test_megatrons_own_tests_run_in_an_environment_of_their_own_made_first():
    planned = make("--dry-run", "--always-make", "test-upstream", "MEGATRON_LM=/some where").stdout
    made = planned.index("scripts/bootstrap --beside compat/upstream.lock .venv-upstream\n")
    assert made < planned.index('-m compat.upstream "/some where"')


def test_megatrons_own_tests_need_a_checkout_and_say_so_before_anything_is_installed():
    environment = {name: value for name, value in os.environ.items() if name not in {"MAKEFLAGS", "MEGATRON_LM"}}
    command = ["make", "--no-print-directory", "test-upstream"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stdout) == (2, "")
    ours = [line for line in done.stderr.splitlines() if not line.startswith("make")]
    assert len(ours) == 1
    assert "MEGATRON_LM: expected the path of a Megatron-LM checkout" in ours[0]


def test_check_runs_the_four_tools():
    planned = make("--dry-run", "check").stdout
    for command in ("ruff format --check", "ruff check", "mypy", "lint-imports"):
        assert command in planned


def test_ci_runs_the_tests_here_and_on_older_releases_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["make test", "make test-compat"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert os.access(BOOTSTRAP, os.X_OK)


@pytest.mark.parametrize(
    ("lock", "pinned"),
    [
        ("requirements.lock", {"torch==2.13.0", "megatron-core==0.19.2"}),
        ("compat/megatron-core-0.17.lock", {"megatron-core==0.17.1"}),
        ("compat/megatron-core-0.18.lock", {"megatron-core==0.18.2"}),
        ("compat/upstream.lock", set()),
    ],
)
def test_lock_pins_every_line_by_hash_and_names_no_index(lock, pinned):
    text = (ROOT / lock).read_text()
    pins = [line for line in text.splitlines() if "==" in line and not line.lstrip().startswith("#")]
    assert {pin.split(" ")[0] for pin in pins} >= pinned
    assert all(pin.endswith("\\") for pin in pins), "a line without a hash"
    assert "://" not in text
    assert "\n--" not in text


@pytest.mark.parametrize("pyenv_root", [False, True], ids=["home", "PYENV_ROOT"])
def test_bootstrap_skips_a_shim_that_does_not_run(tmp_path, pyenv_root):
    for name in (f"python{THIS_VERSION}", "python3", "python"):
        script(tmp_path / "shims" / name, BROKEN_SHIM)
    pyenv = tmp_path / ("elsewhere" if pyenv_root else ".pyenv")
    script(pyenv / "versions" / f"{THIS_VERSION}.0" / "bin" / f"python{THIS_VERSION}", BROKEN_SHIM)
    good = working(pyenv / "versions" / f"{THIS_VERSION}.1" / "bin" / f"python{THIS_VERSION}")
    variables = {"PYENV_ROOT": str(pyenv)} if pyenv_root else {}
    done = find_python(tmp_path, tmp_path / "shims", THIS_VERSION, **variables)
    assert (done.returncode, done.stdout) == (0, f"{good}\n"), done.stderr


def test_bootstrap_looks_behind_a_broken_shim_on_path(tmp_path):
    script(tmp_path / "shims" / f"python{THIS_VERSION}", BROKEN_SHIM)
    good = working(tmp_path / "with space" / "python3")
    path = f"{tmp_path / 'shims'}:{tmp_path / 'with space'}"
    done = find_python(tmp_path, path, THIS_VERSION)
    assert (done.returncode, done.stdout) == (0, f"{good}\n"), done.stderr


def test_bootstrap_prefers_the_interpreter_it_was_told(tmp_path):
    working(tmp_path / "bin" / f"python{THIS_VERSION}")
    told = working(tmp_path / "mine" / "python")
    done = find_python(tmp_path, tmp_path / "bin", THIS_VERSION, PYTHON=str(told))
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{told}\n", "")


def test_bootstrap_says_so_when_the_interpreter_it_was_told_does_not_run(tmp_path):
    good = working(tmp_path / "bin" / f"python{THIS_VERSION}")
    told = script(tmp_path / "mine" / "python", BROKEN_SHIM)
    done = find_python(tmp_path, tmp_path / "bin", THIS_VERSION, PYTHON=str(told))
    assert (done.returncode, done.stdout) == (0, f"{good}\n")
    assert f"PYTHON={told}" in done.stderr


def test_bootstrap_says_in_one_line_how_to_get_an_interpreter(tmp_path):
    done = find_python(tmp_path, tmp_path, "9.9")
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert "no Python 9.9" in done.stderr
    assert "PYTHON=" in done.stderr


def test_bootstrap_puts_the_packages_of_a_second_lock_in_the_place_of_ours(tmp_path):
    """A stand-in for uv keeps what it is told to install; no environment is made."""
    kept = tmp_path / "kept"
    script(tmp_path / "uv", f'#!/bin/sh\nfor last; do :; done\ncase "$*" in *sync*) cp "$last" {kept} ;; esac\n')
    second = tmp_path / "second.lock"
    second.write_text("# of 0.17\nmegatron-core==0.17.1 \\\n    --hash=sha256:0\nnot-in-ours==1 \\\n    --hash=sha256:1\n")
    environment = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "PYTHON": sys.executable}
    command = [BOOTSTRAP, "--beside", second, tmp_path / "venv"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    ours, merged = (ROOT / "requirements.lock").read_text(), kept.read_text()
    pins = [line.split(" ")[0] for line in merged.splitlines() if line[:1].isalnum()]
    expected = [line.split(" ")[0] for line in ours.splitlines() if line[:1].isalnum()]
    expected.remove("megatron-core==0.19.2")
    assert pins == [*expected, "megatron-core==0.17.1", "not-in-ours==1"]
    (block,) = re.findall(r"^megatron-core==0\.19\.2 .*?\n(?=\w)", ours, re.MULTILINE | re.DOTALL)
    assert merged == ours.replace(block, "") + second.read_text()


def test_bootstrap_says_which_second_lock_is_not_there(tmp_path):
    command = [BOOTSTRAP, "--beside", tmp_path / "absent.lock", tmp_path / "venv"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, (tmp_path / "venv").exists()) == (1, False)
    assert done.stderr == f"bootstrap: no lock file '{tmp_path / 'absent.lock'}'\n"


def test_bootstrap_names_an_argument_it_does_not_know():
    done = subprocess.run([BOOTSTRAP, "--bogus"], capture_output=True, text=True, check=False, timeout=30)
    assert done.returncode == 1
    assert "'--bogus'" in done.stderr
