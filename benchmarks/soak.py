"""200 random moves in one job of 8 gloo ranks: what each rank stands on stays flat, and the end equals a run without moves."""

import random
from collections.abc import Sequence

from benchmarks.machine import show
from megatron_dyn.testing.footing import Footing
from tests.distributed.plugin_run import run as train

NUM_MOVES = 200
EVERY = 20
"""Steps between two looks at what a rank stands on."""
WORLD_SIZE, NUM_STAGES, NUM_LAYERS = 8, 4, 8
FLAGS = {
    "num_layers": NUM_LAYERS,
    "pipeline_model_parallel_size": NUM_STAGES,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": NUM_MOVES + 2,
    "clip_grad": 0.5,
    "bf16": True,
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "log_interval": 50,
}


def run() -> None:
    """Print the tables; SystemExit 1 unless all moves were made, everything was flat, and the end is equal in every bit."""
    still = train(WORLD_SIZE, timeout_seconds=1800, watch=EVERY, **FLAGS)
    moved = train(WORLD_SIZE, timeout_seconds=1800, watch=EVERY, dyn_layout_at=random_layouts(), **FLAGS)
    equal = moved.numbers() == still.numbers() and moved.state == still.state
    committed = sum(line["outcome"] == "commit" for line in moved.rounds)
    rows = [_row(rank, looks, plain) for rank, (looks, plain) in enumerate(zip(moved.footings, still.footings, strict=True))]
    columns = ["rank", "groups", "threads", "handles", "hooks", "resident MiB", "KiB a step", "without moves"]
    show(f"{committed} random moves, PP {NUM_STAGES} x DP 2, 8 gloo ranks, distributed optimizer, bf16", columns, rows)
    moved_bytes = sum(line["moved_bytes"] for line in moved.rounds)
    seconds = sum(line["moving_seconds"] for line in moved.rounds)
    verdict = "equal in every bit" if equal else "DIFFERENT"
    show(
        "the whole job",
        ["moves", "moved", "seconds moving", "losses, norms, parameters, moments"],
        [[str(committed), f"{moved_bytes / 2**20:.0f} MiB", f"{seconds:.1f}", verdict]],
    )
    # Hooks and handles of a rank follow from how many layers it holds; groups and threads must never change.
    flat = all(
        {(look.process_groups, look.threads) for look in looks} == {(looks[0].process_groups, looks[0].threads)}
        for looks in moved.footings
    )
    if not (equal and flat and committed == NUM_MOVES):
        raise SystemExit(1)


def random_layouts() -> str:
    """A different random split after every step."""
    draw = random.Random(8)
    counts, items = [NUM_LAYERS // NUM_STAGES] * NUM_STAGES, []
    for step in range(1, NUM_MOVES + 1):
        before = counts
        while counts == before:
            borders = sorted(draw.sample(range(1, NUM_LAYERS), NUM_STAGES - 1))
            counts = [end - start for start, end in zip([0, *borders], [*borders, NUM_LAYERS], strict=True)]
        items.append(f"{step}:E{'|'.join('t' * count for count in counts)}L")
    return ";".join(items)


def _row(rank: int, looks: Sequence[Footing], plain: Sequence[Footing]) -> list[str]:
    first, last = looks[1], looks[-1]
    pairs = [(look.process_groups, look.threads, look.file_handles, look.hooks) for look in (first, last)]
    spans = [f"{start} -> {end}" for start, end in zip(*pairs, strict=True)]
    resident = f"{first.resident_bytes / 2**20:.0f} -> {last.resident_bytes / 2**20:.0f}"
    return [str(rank), *spans, resident, f"{_growth(looks):.1f}", f"{_growth(plain):.1f}"]


def _growth(looks: Sequence[Footing]) -> float:
    """KiB of resident memory a step, after the first looks."""
    return (looks[-1].resident_bytes - looks[1].resident_bytes) / (EVERY * (len(looks) - 2)) / 2**10


if __name__ == "__main__":
    run()
