"""`make bench`: run all benchmarks, or those named: `make bench ARGS="planner overhead"`."""

import importlib
import sys

NAMES = ("planner", "overhead", "move_bandwidth", "step_time")
LONG = ("soak", "dynamics")
"""Run only when named."""


def main(names: list[str]) -> int:
    """Run the named benchmarks in order; 2 when a name is unknown."""
    unknown = [name for name in names if name not in (*NAMES, *LONG)]
    if unknown:
        sys.stderr.write(f"benchmarks: error: expected names out of {', '.join((*NAMES, *LONG))}, got {', '.join(unknown)}\n")
        return 2
    for name in names or NAMES:
        importlib.import_module(f"benchmarks.{name}").run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
