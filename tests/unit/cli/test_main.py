"""The command as a whole: help, version, completion, exit codes, and that none of it needs torch."""

import os
import subprocess
import sys

import pytest

from megatron_dyn.cli.main import COMMANDS


def test_help_names_every_command(command):
    ran = command("--help")
    assert ran.code == 0
    for module in COMMANDS:
        assert module.__name__.rpartition(".")[2].removesuffix("_command") in ran.out
    assert "Exit codes: 0 done" in ran.out


def test_the_version_is_told(command):
    assert command("--version").out.startswith("megatron-dyn 0.")


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_scripts_know_commands_and_flags(command, shell):
    ran = command("--print-completion", shell)
    assert ran.code == 0
    assert "memory-gib" in ran.out
    assert "layout" in ran.out


def test_no_command_is_bad_input(command):
    assert command().code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("simulate", "--kind", "moe", "--layers", 8, "--pp", 4, "--rebalance", "foo"), "--rebalance: expected off, auto,"),
        (
            ("simulate", "--kind", "moe", "--layers", 8, "--pp", 4, "--rebalance", f"every:{'9' * 5000}"),
            "--rebalance: expected",
        ),
        (("plan", "t.json", "--pp", 2, "--shrink-policy", "foo"), "--shrink-policy: expected off,"),
    ],
)
def test_refusals_name_the_flags_of_this_command(command, words, told):
    ran = command(*words)
    assert ran.code == 2
    assert ran.err.startswith(f"megatron-dyn: error: {told}")
    assert ran.err.count("\n") == 1


# One process for all that only a process shows: what was imported, and a reader that goes away.
ALONE = """
import sys
from megatron_dyn.cli.main import main
assert main(["layout", "EttL", "--json"]) == 0
heavy = {"torch", "megatron", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
sys.stdout.flush()
sys.exit(main(["schema"]))
"""


def test_it_needs_no_torch_and_ends_quietly_when_nobody_reads():
    read, write = os.pipe()
    os.close(read)
    run = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    code = "import sys; from megatron_dyn.cli.main import main; sys.exit(main(['schema']))"
    run = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (run.returncode, run.stderr) == (0, "")
