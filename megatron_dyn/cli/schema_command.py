"""`megatron-dyn schema`: the JSON schemas of timing and trace files, for editors and for other tools."""

import argparse
import sys

from megatron_dyn.cli.timing_schema import schema_text
from megatron_dyn.cli.trace_file import trace_schema_text

_SCHEMAS = {"timing": schema_text, "trace": trace_schema_text}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    text = "Write the JSON schema (draft 2020-12) of timing files, or that of trace files, to stdout."
    parser = subparsers.add_parser("schema", help="print the schema of timing or trace files", description=text)
    parser.add_argument(
        "kind", nargs="?", choices=list(_SCHEMAS), default="timing", help="of which files; default: %(default)s"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the schema; returns 0."""
    sys.stdout.write(_SCHEMAS[args.kind]())
    return 0
