"""Megatron's own pipeline schedules on real gloo processes, over chunks that sleep where a model would compute.

Asleep a rank takes no core, so many ranks keep their times on few cores. Collaborators: megatron_dyn.testing.ranks.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dyn.host import cpu
from megatron_dyn.plan import ChunkTimes, Op, Phase
from megatron_dyn.testing.ranks import run_ranks

NUM_STEPS = 2
"""Measured steps of each case, after one without sleep that sets up connections; the fastest counts."""
NUM_TRANSFERS = 9
"""Transfers timed, of which the median counts."""
LATE_SECONDS = 0.0004
"""How much later than asked for an operation ends: the process wakes up late, and Megatron has work left in the step."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One schedule to run."""

    name: str
    times: ChunkTimes
    num_microbatches: int
    group_size: int | None = None
    overlap_p2p: bool | None = None
    forward_only: bool = False

    @property
    def shape(self) -> tuple[int, int, int | None, bool]:
        """What `schedule_config` takes; transfers overlap where Megatron has them overlap unless told otherwise."""
        num_virtual = len(self.times.forward_seconds) // self.times.num_stages
        overlap = num_virtual > 1 if self.overlap_p2p is None else self.overlap_p2p
        return self.times.num_stages, num_virtual, self.group_size, overlap

    @property
    def options(self) -> dict[str, Any]:
        """What the simulator has to be told besides times and micro-batches."""
        return {"group_size": self.group_size, "overlap_p2p": self.overlap_p2p, "forward_only": self.forward_only}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a case gave."""

    seconds: float
    """From the first rank's start to the last rank's end, of the fastest step."""
    p2p_seconds: float
    """What a call of Megatron's takes from one rank to the next, when the next one waits for it."""
    orders: list[list[Op]]
    """By pp_rank: what ran in a step, in order, by what the tensors themselves said."""


def run_cases(cases: Sequence[Case]) -> dict[str, Measured]:
    """Run cases of the same number of stages, one after another, on as many ranks; returns what was measured, by name."""
    num_stages = cases[0].times.num_stages
    by_rank = run_ranks(_rank_main, num_stages, list(cases), timeout_seconds=60)
    sent, received = (transfers for transfers, _ in by_rank[:2])
    p2p_seconds = statistics.median(end - start for start, end in zip(sent, received, strict=True))
    found = {}
    for index, case in enumerate(cases):
        of_ranks = [of_rank[index] for _, of_rank in by_rank]
        steps = zip(*(moments for moments, _ in of_ranks), strict=True)
        seconds = min(max(end for _, end in step) - min(start for start, _ in step) for step in steps)
        found[case.name] = Measured(seconds=seconds, p2p_seconds=p2p_seconds, orders=[order for _, order in of_ranks])
    return found


class _Sleep(torch.autograd.Function):
    """Sleeps both ways, and notes what passes: a tensor says how many chunks it has been through, and its micro-batch."""

    @staticmethod
    def forward(ctx, through, chunk):
        ctx.chunk = chunk
        ctx.passed, ctx.microbatch = (int(number) for number in through.flatten()[:2])
        chunk.log.append(Op(phase=Phase.FORWARD, chunk=ctx.passed, microbatch=ctx.microbatch))
        output = through + torch.tensor([1.0, 0.0])
        _sleep_until(chunk.started + chunk.forward_seconds * chunk.sleeps)
        return output

    @staticmethod
    def backward(ctx, gradient):
        start = time.monotonic()
        ctx.chunk.log.append(Op(phase=Phase.BACKWARD, chunk=ctx.passed, microbatch=ctx.microbatch))
        _sleep_until(start + ctx.chunk.backward_seconds * ctx.chunk.sleeps)
        return gradient, None


class _Chunk(torch.nn.Module):
    """A model chunk as the schedules know it."""

    def __init__(self, config: Any, case: Case, index: int, log: list[Op]) -> None:
        super().__init__()
        self.config, self.log, self.received, self.started = config, log, None, 0.0
        self.sleeps = True
        self.model_type = None  # the interleaved schedule asks for it, and does nothing with it
        self.forward_seconds = case.times.forward_seconds[index]
        self.backward_seconds = case.times.backward_seconds[index]
        self.weight = torch.nn.Parameter(torch.zeros(2))

    def set_input_tensor(self, tensors: Sequence[torch.Tensor | None]) -> None:
        # The first thing a forward step does with the chunk: what Megatron and autograd take from here on is slept less.
        self.started = time.monotonic()
        self.received = tensors[0]

    def forward(self, microbatch: int) -> torch.Tensor:
        first = self.received is None
        through = (torch.tensor([0.0, float(microbatch)]) + self.weight).reshape(1, 1, 2) if first else self.received
        return _Sleep.apply(through, self)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic() - LATE_SECONDS))


def _rank_main(cases: Sequence[Case]) -> tuple[list[float], list[tuple[list[tuple[float, float]], list[Op]]]]:
    """Returns the moments at which transfers began (rank 0) and ended (rank 1), and the moments and order of each case."""
    from megatron.core import parallel_state

    cpu.activate()
    torch.distributed.init_process_group("gloo")
    num_stages = cases[0].times.num_stages
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=num_stages)
    transfers = _time_transfers(cases[0])
    found = [_run_case(case) for case in cases]
    torch.distributed.destroy_process_group()
    return transfers, found


def _time_transfers(case: Case) -> list[float]:
    from megatron.core.parallel_state import get_pipeline_model_parallel_group
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    communicator = P2PCommunicator(pp_group=get_pipeline_model_parallel_group(), config=schedule_config(*case.shape))
    moments = []
    for _ in range(1 + NUM_TRANSFERS):
        torch.distributed.barrier()
        if torch.distributed.get_rank() == 0:
            # Long enough for the other side to be waiting, and to be woken up as from a sleeping chunk.
            time.sleep(0.01)
            moments.append(time.monotonic())
            communicator.send_forward(torch.zeros(1, 1, 2), is_last_stage=False)
        elif torch.distributed.get_rank() == 1:
            communicator.recv_forward([1, 1, 2], is_first_stage=False)
            moments.append(time.monotonic())
    return moments[1:]


def _run_case(case: Case) -> tuple[list[tuple[float, float]], list[Op]]:
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    log: list[Op] = []
    config = schedule_config(*case.shape)
    pp_rank, num_stages = torch.distributed.get_rank(), case.times.num_stages
    chunks = [_Chunk(config, case, index, log) for index in range(pp_rank, len(case.times.forward_seconds), num_stages)]
    step = get_forward_backward_func(pp_size=num_stages, vp_size=config.virtual_pipeline_model_parallel_size)
    moments = []
    for number in range(1 + NUM_STEPS):
        log.clear()
        for chunk in chunks:
            chunk.sleeps = number > 0
        torch.distributed.barrier()
        start = time.monotonic()
        with torch.set_grad_enabled(not case.forward_only):
            step(
                forward_step_func=forward_step,
                data_iterator=[iter(range(case.num_microbatches)) for _ in chunks],
                model=chunks,
                num_microbatches=case.num_microbatches,
                seq_length=1,
                micro_batch_size=1,
                forward_only=case.forward_only,
            )
        moments.append((start, time.monotonic()))
    return moments[1:], log


def forward_step(microbatches: Iterator[int], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    """What the schedules call for a forward: the output, and what makes a loss of it."""
    return chunk(next(microbatches)), lambda output: (output.sum(), {})


def schedule_config(num_stages: int, num_virtual: int, group_size: int | None, overlap_p2p: bool) -> Any:
    """As training sets it up: outputs freed once sent, batched calls unless transfers overlap."""
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(
        num_layers=num_stages * num_virtual,
        hidden_size=2,
        num_attention_heads=1,
        pipeline_model_parallel_size=num_stages,
        virtual_pipeline_model_parallel_size=num_virtual if num_virtual > 1 else None,
        microbatch_group_size_per_vp_stage=group_size,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        overlap_p2p_comm=overlap_p2p,
        batch_p2p_comm=not overlap_p2p,
    )
