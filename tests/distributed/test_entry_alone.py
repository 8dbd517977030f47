"""The entry script as a process of its own, where nothing has been imported before it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_local_megatron_comes_before_the_wheel_and_an_unsupported_one_is_refused(tmp_path):
    package = tmp_path / "megatron" / "core"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "package_info.py").write_text("__version__ = '0.20.0'\n")
    found = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt_dynamic.py"), "--num-layers", "8"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 1
    assert found.stderr.splitlines() == [
        "pretrain_gpt_dynamic.py: error: megatron-core: expected 0.17 <= megatron-core < 0.20, actual 0.20.0"
    ]


def test_help_lists_our_flags_in_a_group_of_their_own():
    found = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt_dynamic.py"), "--help"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-500:]
    group = found.stdout.partition("dynamic balancing (megatron_dyn):")[2]
    flags = re.findall(r"^  (--[a-z-]+)", group, re.MULTILINE)
    assert {"--dyn-device", "--dyn-rebalance", "--dyn-timeout-seconds"} <= set(flags)
    assert all(flag.startswith("--dyn-") for flag in flags)
