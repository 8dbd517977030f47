"""The `megatron-dyn` command: finds the subcommand, and turns refusals into one line and an exit code.

A subcommand is a module in COMMANDS with `add_parser(subparsers)`, which sets `run`, a function of the parsed arguments that
returns the exit code. Nothing here or below imports torch or Megatron, so that it works on any machine.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

import shtab

from megatron_dyn.cli import layout_command, plan_command, record_command, schema_command, simulate_command
from megatron_dyn.cli.errors import InputError, with_own_flags
from megatron_dyn.config import ConfigError
from megatron_dyn.plan.problem import InfeasibleSplit
from megatron_dyn.records import LayoutError

COMMANDS = (plan_command, simulate_command, layout_command, record_command, schema_command)

BAD_INPUT = 2
"""Exit code for input or flags that cannot be used, as argparse has it."""
INFEASIBLE = 1
"""Exit code when the input is good and nothing meets its constraints."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command."""
    parser = argparse.ArgumentParser(
        prog="megatron-dyn",
        description="Plan pipeline layouts for Megatron from timing files or a run's report, without a GPU.",
        epilog=f"Exit codes: 0 done, {INFEASIBLE} nothing meets the constraints, {BAD_INPUT} bad input.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version('megatron-dyn')}")
    shtab.add_argument_to(parser, ["--print-completion"], help="print the completion script of a shell")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (None: the process's); returns the exit code. argparse itself exits on bad flags."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except InfeasibleSplit as error:
        return _fail(str(error), INFEASIBLE)
    except (InputError, LayoutError) as error:
        return _fail(str(error), BAD_INPUT)
    except ConfigError as error:
        # Of a configuration as a run has it; its user gave the flags of this command.
        return _fail(with_own_flags(str(error)), BAD_INPUT)
    except BrokenPipeError:
        # The reader, such as head, has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _fail(problem: str, code: int) -> int:
    sys.stderr.write(f"megatron-dyn: error: {problem}\n")
    return code
