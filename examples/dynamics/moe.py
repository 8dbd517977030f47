"""Mixture of experts: four dense layers and four with eight experts; the loads are counted, and a bias evens them out.

python examples/dynamics/moe.py [--steps N] [--input FILE ...]
"""

import sys

from demo import Demo, main
from rich.console import Console
from rich.table import Table
from story import Story


def family_flags(num_steps: int) -> list[str]:
    """Loads in six lines over the run; a bias in place of an auxiliary loss, quicker than by default."""
    return f"--dyn-moe --dyn-moe-interval {num_steps // 6} --dyn-moe-routing loss-free --dyn-moe-bias-rate 0.01".split()


def show_loads(story: Story, console: Console) -> None:
    """How uneven the experts of each layer were, over the run."""
    told = [line for line in story.changes if line["family"] == "moe"]
    table = Table(title="tokens of the busiest expert, in units of the mean", title_justify="left")
    table.add_column("up to step")
    for layer in told[0]["layers"] if told else ():
        table.add_column(f"layer {layer['layer']}")
    for line in told:
        table.add_row(str(line["iteration"]), *(f"{layer['max_over_mean']:.2f}" for layer in line["layers"]))
    console.print(table)


DEMO = Demo(
    name="moe",
    title="mixture of experts behind dense layers, loads evened by a bias",
    model_flags="--num-layers 8 --hidden-size 128 --global-batch-size 16 --num-experts 8 --moe-router-topk 2 "
    "--moe-layer-freq [0,0,0,0,1,1,1,1] --moe-router-load-balancing-type none --moe-aux-loss-coeff 0 --disable-bias-linear",
    family_flags=family_flags,
    facts=show_loads,
)

if __name__ == "__main__":
    sys.exit(main(DEMO))
