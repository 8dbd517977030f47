"""Makes the scripts of `examples/quickstart/` importable, by the bare names they use for each other."""

import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[3] / "examples" / "quickstart"
sys.path.insert(0, str(QUICKSTART))
