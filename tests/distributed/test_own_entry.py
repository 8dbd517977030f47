"""The README's lines for an entry script of one's own, run as they stand there."""

import importlib
import re
import sys
from pathlib import Path

from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments

README = Path(__file__).parents[2] / "README.md"


def run_the_block(block, argv):
    """What the block leaves: the targets of the seams it put in force, and how many are left after undo()."""
    seams = importlib.import_module("megatron_dyn.host.seams")
    flags = importlib.import_module("megatron_dyn.host.cpu.flags")
    with importlib.import_module("megatron_dyn.host.cpu").activate():
        sys.argv = ["own_entry.py", *flags.cpu_arguments(argv)[0]]
        names = {}
        exec(block, names)
        installation = names["installation"]
        in_force = [seam.target for seam in installation.seams if seams.is_applied(seam)]
        installation.undo()
        return in_force, sum(seams.is_applied(seam) for seam in installation.seams)


def test_three_lines_put_the_plugin_into_any_entry_script():
    (block,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    argv = tiny_gpt_arguments(pipeline_model_parallel_size=2, dyn_rebalance="auto")
    for in_force, left in run_ranks(run_the_block, 2, block, argv):
        assert "megatron.training.training:train_step" in in_force
        assert left == 0
