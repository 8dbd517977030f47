"""Profiling overhead: sampled steps against the unsampled ones between them, in one run."""

from statistics import median

from benchmarks.machine import show
from benchmarks.training import timed_run
from megatron_dyn.config import MeasureConfig

NUM_STEPS = 64


def run() -> float:
    """Print the table; returns the share of step time that the default sampling costs."""
    # min-gain just below 1: it measures and decides, but never moves, so that all steps run under one layout.
    timed = timed_run(2, train_iters=NUM_STEPS, dyn_rebalance="auto", dyn_profile_interval=2, dyn_min_gain=0.99)
    # Step numbers start at 1; the first four are warm-up.
    sampled = [seconds for step, seconds in enumerate(timed.step_seconds, 1) if step > 4 and step % 2 == 0]
    others = [seconds for step, seconds in enumerate(timed.step_seconds, 1) if step > 4 and step % 2 == 1]
    # Neighbours are compared, so that a machine that slows down for a while does not count as overhead.
    ratio = median(one / other for one, other in zip(sampled, others, strict=True))
    interval = MeasureConfig().interval_steps
    deciding = sum(line["deciding_seconds"] + line["measuring_seconds"] for line in timed.rounds) / len(timed.rounds)
    share = (ratio - 1) / interval
    show(
        "profiling overhead, PP 2",
        ["sampled step", "unsampled step", "ratio", f"share at 1 in {interval} steps", "hooks and decision per round"],
        [[f"{median(sampled):.4f} s", f"{median(others):.4f} s", f"{ratio:.4f}", f"{share:.2%}", f"{deciding * 1e3:.1f} ms"]],
    )
    return share


if __name__ == "__main__":
    run()
