"""Step time at PP 2 on two cores: uniform, rebalanced by us, and the best static split in hindsight."""

from statistics import median

from benchmarks.machine import show
from benchmarks.training import timed_run

NUM_STEPS = 40
NUM_LAYERS = 8


def run() -> float:
    """Print the table; returns the rebalanced step time over that of the best contiguous split."""
    uniform = timed_run(2, train_iters=NUM_STEPS)
    ours = timed_run(2, train_iters=NUM_STEPS, dyn_rebalance="auto", dyn_profile_interval=3, dyn_cooldown_steps=6)
    static = {
        front: tail_median(
            timed_run(2, train_iters=12, pipeline_model_parallel_layout=f"Et*{front}|t*{NUM_LAYERS - front}L").step_seconds
        )
        for front in range(NUM_LAYERS // 2, NUM_LAYERS)
    }
    best = min(static, key=lambda front: static[front])
    before, after = tail_median(uniform.step_seconds), tail_median(ours.step_seconds)
    moves = [line for line in ours.rounds if line["outcome"] == "commit"]
    layout = moves[-1]["layout_after"] if moves else "Et*4|t*4L"
    rows = [
        ["uniform (Megatron's own)", "Et*4|t*4L", f"{before:.3f} s", "1.00"],
        [f"megatron_dyn, {len(moves)} moves", layout, f"{after:.3f} s", f"{before / after:.2f}"],
        [
            "best static split in hindsight",
            f"Et*{best}|t*{NUM_LAYERS - best}L",
            f"{static[best]:.3f} s",
            f"{before / static[best]:.2f}",
        ],
    ]
    show("step time, PP 2", ["split", "layout at the end", "step", "times as fast"], rows)
    return after / static[best]


def tail_median(seconds: list[float]) -> float:
    """Median of the last steps: after all moves, without warm-up."""
    return median(seconds[-8:])


if __name__ == "__main__":
    run()
