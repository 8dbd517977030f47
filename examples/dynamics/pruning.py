"""Gradual pruning: whole outputs of the linear layers go, by magnitude, until a tenth is left; the head stays as it is.

python examples/dynamics/pruning.py [--steps N] [--input FILE ...]
"""

import sys

from demo import Demo, main
from rich.console import Console
from rich.table import Table
from story import Story


def family_flags(num_steps: int) -> list[str]:
    """Four levels, from a sixth of the run to two thirds of it."""
    start, end = num_steps // 6, 2 * num_steps // 3
    every = max(1, (end - start) // 3)
    return (
        f"--dyn-prune --dyn-prune-start {start} --dyn-prune-end {end} --dyn-prune-every {every} "
        "--dyn-prune-final 0.9 --dyn-prune-pattern rows"
    ).split()


def show_kernels(story: Story, console: Console) -> None:
    """The levels, and for how many weights a kernel other than the dense one was chosen, product by product."""
    products = ("forward", "input_gradient", "weight_gradient")
    table = Table(title="levels and kernels", title_justify="left")
    for column in ("after step", "pruned", *(product.replace("_", " ") for product in products)):
        table.add_column(column)
    for line in story.changes:
        cells = [
            ", ".join(f"{kernel} {count}" for kernel, count in line["kernels"].get(product, {}).items()) or "dense"
            for product in products
        ]
        table.add_row(str(line["iteration"]), f"{line['level']:.1%}", *cells)
    console.print(table)


DEMO = Demo(
    name="pruning",
    title="gradual pruning to 90 %, whole outputs",
    # The head, 2,000 tokens padded to 2,048, weighs about one dense layer and is not pruned: in the end it weighs several.
    model_flags="--num-layers 8 --hidden-size 256 --global-batch-size 8",
    family_flags=family_flags,
    facts=show_kernels,
)

if __name__ == "__main__":
    sys.exit(main(DEMO))
