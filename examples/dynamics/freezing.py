"""Layer freezing: the first half of the layers stops training after a third of the run, two more after another third.

python examples/dynamics/freezing.py [--steps N] [--input FILE ...]
"""

import json
import sys

from demo import Demo, main


def family_flags(num_steps: int) -> list[str]:
    """Finished steps, start inclusive, end exclusive; -1 is for good."""
    schedule = {"0-3": [num_steps // 3, -1], "4-5": [2 * num_steps // 3, -1]}
    return ["--dyn-freeze", json.dumps(schedule)]


DEMO = Demo(
    name="freezing",
    title="layers freeze front to back: 4 of 8, then 6",
    model_flags="--num-layers 8 --hidden-size 128 --global-batch-size 16",
    family_flags=family_flags,
)

if __name__ == "__main__":
    sys.exit(main(DEMO))
