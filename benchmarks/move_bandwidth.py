"""Bytes per second of a move (pack, send, verify, build, commit) against a bare send of as many bytes, in one run."""

import functools
import time
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.machine import show
from benchmarks.training import timed_run

NUM_MOVES = 6
NUM_BYTES = 150_000_000
NUM_SENDS = 5


def run() -> float:
    """Print the table; returns how many times longer a move takes than the bare send."""
    layouts = ";".join(f"{step}:{'Et|t*7L' if step % 2 else 'Et*4|t*4L'}" for step in range(1, NUM_MOVES + 1))
    timed = timed_run(
        2,
        after=functools.partial(bare_send_seconds, NUM_BYTES),
        hidden_size=512,
        num_attention_heads=8,
        vocab_size=512,
        global_batch_size=4,
        train_iters=NUM_MOVES + 2,
        dyn_layout_at=layouts,
    )
    # The first move pays for connections and fresh memory; a job makes many.
    moves = timed.rounds[1:]
    rates = [line["moved_bytes"] / line["moving_seconds"] for line in moves]
    bare = NUM_BYTES / timed.extra
    rows = [
        [
            "move",
            f"{moves[0]['moved_bytes'] / 2**20:.0f} MiB",
            f"{median(rates) / 1e6:.0f} MB/s",
            f"{bare / median(rates):.2f}",
        ],
        ["bare send", f"{NUM_BYTES / 2**20:.0f} MiB", f"{bare / 1e6:.0f} MB/s", "1.00"],
    ]
    show("moving layers, PP 2, gloo on one host", ["what", "size", "rate", "times the bare send"], rows)
    return bare / median(rates)


def bare_send_seconds(num_bytes: int) -> float:
    """Median seconds to send `num_bytes` from rank 0 to rank 1 over the default group. Both ranks must call."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(NUM_SENDS):
        dist.barrier()
        started = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(buffer, 1)
        else:
            dist.recv(buffer, 0)
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


if __name__ == "__main__":
    run()
