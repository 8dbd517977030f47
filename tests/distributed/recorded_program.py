"""What Megatron's schedules compute, post and wait for on one rank, written down with a communicator that sends nothing.

Whatever a rank does follows from its place alone, so each rank can run by itself, its peers imagined. Collaborators:
sleeping_pipeline (the config), megatron_dyn.plan (numbers of operations and messages).
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron_dyn.host import cpu
from megatron_dyn.plan import Op, Phase
from megatron_dyn.plan.pipeline.program import Do, Instruction, number_of
from megatron_dyn.plan.pipeline.schedule import Schedule
from megatron_dyn.testing.ranks import run_ranks
from tests.distributed.sleeping_pipeline import forward_step, schedule_config


def record_programs(shapes: Sequence[tuple[Schedule, bool]]) -> list[list[list[Instruction]]]:
    """By shape (schedule, whether transfers overlap) and by pp_rank: what Megatron does in a step."""
    [found] = run_ranks(_record_all, 1, list(shapes), timeout_seconds=60)
    return found


def _record_all(shapes: Sequence[tuple[Schedule, bool]]) -> list[list[list[Instruction]]]:
    cpu.activate()
    # Without any group Megatron takes every rank for the only one.
    torch.distributed.init_process_group("gloo")
    found = [[_record(schedule, overlap, rank) for rank in range(schedule.num_stages)] for schedule, overlap in shapes]
    torch.distributed.destroy_process_group()
    return found


class _Notes:
    """The program as it is seen. What is received has a ticket, until the operation that uses it tells what it was."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._seen: list[tuple[Do, int]] = []
        self._ticket, self._uses = 0, {}

    def add(self, do: Do, number: int) -> None:
        self._seen.append((do, number))

    def new_ticket(self) -> int:
        self._ticket -= 1
        return self._ticket

    def run(self, op: Op, received: torch.Tensor | None) -> None:
        """`op` runs on a tensor received, or none at the ends of the model."""
        self.add(Do.COMPUTE, number_of(self.schedule, op))
        if received is not None:
            self._uses[int(received.flatten()[0])] = number_of(self.schedule, op)

    def program(self) -> list[Instruction]:
        return [(do, number if number >= 0 else self._uses[number]) for do, number in self._seen]


class _Pass(torch.autograd.Function):
    """Lets a tensor through both ways; what comes out says which message it is."""

    @staticmethod
    def forward(ctx, through, chunk, microbatch):
        ctx.chunk, ctx.microbatch = chunk, microbatch
        chunk.notes.run(Op(phase=Phase.FORWARD, chunk=chunk.index, microbatch=microbatch), chunk.received)
        return chunk.message(Phase.FORWARD, chunk.index + 1, microbatch)

    @staticmethod
    def backward(ctx, gradient):
        chunk, microbatch = ctx.chunk, ctx.microbatch
        received = None if chunk.is_last else gradient
        chunk.notes.run(Op(phase=Phase.BACKWARD, chunk=chunk.index, microbatch=microbatch), received)
        return chunk.message(Phase.BACKWARD, chunk.index - 1, microbatch), None, None


class _Chunk(torch.nn.Module):
    def __init__(self, config: Any, notes: _Notes, index: int) -> None:
        super().__init__()
        self.config, self.notes, self.index = config, notes, index
        self.is_last = index == notes.schedule.num_chunks - 1
        self.model_type, self.received = None, None
        self.weight = torch.nn.Parameter(torch.zeros(1, 1, 2))

    def set_input_tensor(self, tensors: Sequence[torch.Tensor | None]) -> None:
        self.received = tensors[0]

    def forward(self, microbatch: int) -> torch.Tensor:
        return _Pass.apply(self.weight + 0 if self.received is None else self.received, self, microbatch)

    def message(self, phase: Phase, chunk: int, microbatch: int) -> torch.Tensor:
        """A tensor that holds the number of a message, which nobody reads at the ends of the model."""
        if not 0 <= chunk < self.notes.schedule.num_chunks:
            return torch.zeros(1, 1, 2)
        number = number_of(self.notes.schedule, Op(phase=phase, chunk=chunk, microbatch=microbatch))
        return torch.full((1, 1, 2), float(number))


def _record(schedule: Schedule, overlap: bool, pp_rank: int) -> list[Instruction]:
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    from megatron.core.process_groups_config import ProcessGroupCollection

    notes = _Notes(schedule)

    class Communicator(P2PCommunicator):
        """Megatron's, but for the call in which all others end."""

        def __init__(self) -> None:
            self.pp_group = SimpleNamespace(size=lambda: schedule.num_stages, rank=lambda: pp_rank)
            self.config = config
            self.virtual_pipeline_model_parallel_size = config.virtual_pipeline_model_parallel_size

        def _communicate(self, *, tensor_send_next, tensor_send_prev, recv_prev, recv_next, tensor_shape, wait_on_reqs=True):
            sends = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
            numbers = {name: int(tensor.flatten()[0]) for name, tensor in sends.items() if tensor is not None}
            wanted = {"recv_prev": recv_prev, "recv_next": recv_next}
            tickets = {name: notes.new_ticket() for name, is_wanted in wanted.items() if is_wanted}
            numbers |= tickets
            for number in numbers.values():
                notes.add(Do.POST, number)
            handles = {name: _Handle(notes, number) for name, number in numbers.items()}
            if wait_on_reqs:
                for handle in handles.values():
                    handle.wait()
            received = {name: torch.full((1, 1, 2), float(ticket), requires_grad=True) for name, ticket in tickets.items()}
            return received.get("recv_prev"), received.get("recv_next"), None if wait_on_reqs else handles

    config = schedule_config(schedule.num_stages, schedule.num_virtual, schedule.group_size, overlap)
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    chunks = [_Chunk(config, notes, index) for index in range(pp_rank, schedule.num_chunks, schedule.num_stages)]
    step = get_forward_backward_func(pp_size=schedule.num_stages, vp_size=config.virtual_pipeline_model_parallel_size)
    step(
        forward_step_func=forward_step,
        data_iterator=[iter(range(schedule.num_microbatches)) for _ in chunks],
        model=chunks,
        num_microbatches=schedule.num_microbatches,
        seq_length=1,
        micro_batch_size=1,
        forward_only=schedule.forward_only,
        p2p_communicator=Communicator(),
        pg_collection=groups,
    )
    return notes.program()


class _Handle:
    def __init__(self, notes: _Notes, number: int) -> None:
        self._notes, self._number = notes, number

    def wait(self) -> None:
        self._notes.add(Do.WAIT, self._number)
