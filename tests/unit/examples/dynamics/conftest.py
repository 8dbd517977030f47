"""Makes the scripts of `examples/dynamics/` importable, by the bare names they use for each other."""

import sys
from pathlib import Path

DYNAMICS = Path(__file__).resolve().parents[4] / "examples" / "dynamics"
sys.path.insert(0, str(DYNAMICS))
