"""Bytes per second of a move (describe, send, verify, build, vote, commit) against a bare send of as many bytes, in one run."""

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
    """Print the table; returns how many times longer a move takes than a bare send into new memory."""
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
    # The first move pays for connections; a job makes many.
    moves = timed.rounds[1:]
    move = median(line["moved_bytes"] / line["moving_seconds"] for line in moves)
    warm, fresh = (NUM_BYTES / seconds for seconds in timed.extra)
    rows = [
        ("move: describe, send, verify, build, vote, commit", moves[0]["moved_bytes"], move),
        ("bare send into new memory, as a move must", NUM_BYTES, fresh),
        ("bare send into memory used before", NUM_BYTES, warm),
    ]
    cells = [[what, f"{size / 2**20:.0f} MiB", f"{rate / 1e6:.0f} MB/s", f"{fresh / rate:.2f}"] for what, size, rate in rows]
    show("moving layers, PP 2, gloo on one host", ["what", "size", "rate", "times the bare send"], cells)
    return fresh / move


def bare_send_seconds(num_bytes: int) -> tuple[float, float]:
    """Median seconds to send `num_bytes` from rank 0 to rank 1: into memory used before, and into new. Both ranks call."""
    return _time_sends(num_bytes, fresh=False), _time_sends(num_bytes, fresh=True)


def _time_sends(num_bytes: int, *, fresh: bool) -> float:
    buffer = torch.zeros(num_bytes, dtype=torch.uint8)
    seconds = []
    for _ in range(NUM_SENDS):
        if fresh and dist.get_rank() == 1:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
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
