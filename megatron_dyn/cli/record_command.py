"""`megatron-dyn record`: a timing file from the report of a real run. The reading is done by `recording`."""

import argparse
import json

import shtab

from megatron_dyn.cli.arguments import count
from megatron_dyn.cli.output import say, warn, write_file, write_json
from megatron_dyn.cli.recording import recorded_timing
from megatron_dyn.cli.timing_file import timing_of
from megatron_dyn.cli.verdicts import with_speeds

DESCRIPTION = (
    "Write what a run measured in one round as a timing file for `plan`, with the layout that was measured (before the "
    "move, if there was one). When layers were measured on several stages, all of it is kept as observations."
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Register the command."""
    parser = subparsers.add_parser("record", help="make a timing file from a run's report", description=DESCRIPTION)
    report = parser.add_argument("report", metavar="DIR", help="the folder of --dyn-report-dir, or its rounds.jsonl")
    report.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.add_argument("--round", type=count, metavar="N", help="the round; default: the last one that measured")
    output = parser.add_argument("-o", "--output", metavar="FILE", help="write here; default: stdout")
    output.complete = shtab.FILE  # type: ignore[attr-defined]
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the file; returns 0. Raises InputError naming file, line and field."""
    document = recorded_timing(args.report, args.round)
    # What is written must be readable: a report that was edited or damaged is refused here, not at the next command.
    timing = timing_of(document)
    assert timing.layout is not None, "a round has the layout that it measured"
    with_speeds(timing, timing.layout.num_stages)
    warn(*document.notes)
    if args.output is None:
        write_json(document.data)
    else:
        write_file("--output", args.output, json.dumps(document.data, indent=2) + "\n")
        say(f"wrote {args.output}: {document.data['source']}")
    return 0
