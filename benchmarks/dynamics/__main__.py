"""`python -m benchmarks.dynamics [--redraw] [--repeats N] [FAMILY ...]`."""

import argparse
import sys

from benchmarks.dynamics.cases import CASES
from benchmarks.dynamics.study import run


def main(words: list[str]) -> int:
    """Run, or only draw, the families named; all without a name."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamics", description="The dynamic families, measured.")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"out of {', '.join(CASES)} (default: all)")
    parser.add_argument("--redraw", action="store_true", help="train nothing: page and pictures from the runs of last time")
    parser.add_argument(
        "--repeats",
        type=int,
        default=1,
        metavar="N",
        help="run each arm N times, in turn, and keep its fastest run (default: 1)",
    )
    options = parser.parse_args(words)
    if unknown := [name for name in options.families if name not in CASES]:
        parser.error(f"FAMILY: expected names out of {', '.join(CASES)}, got {', '.join(unknown)}")
    if options.repeats < 1:
        parser.error(f"--repeats: expected at least 1, got {options.repeats}")
    run(options.families or list(CASES), redraw=options.redraw, num_repeats=options.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
