"""What each pipeline rank does in a step, transfers included: compute, post a transfer, wait for one.

Made from a `Schedule` for `pipeline`, which puts times to it. The rules are those of Megatron's two pipelining functions
and its point-to-point communicator (0.19), as training sets them up (outputs are freed once sent). It must not know times.
"""

from collections import deque
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache

from megatron_dyn.plan.pipeline.schedule import Op, Phase, Schedule


class Do(IntEnum):
    """What a rank does next."""

    COMPUTE = 0
    """Run an operation."""
    POST = 1
    """Offer to send or to receive a message, and go on. A message is under way once both its sides have posted it."""
    WAIT = 2
    """Until a message has arrived: its sender, too, waits for that."""


Instruction = tuple[Do, int]
"""What to do, and with what: an operation or a message, by its number (`number_of`)."""


def number_of(schedule: Schedule, op: Op) -> int:
    """A number for `op`, from 0: also that of the message which is its input."""
    backward_offset = schedule.num_chunks if op.phase is Phase.BACKWARD else 0
    return (backward_offset + op.chunk) * schedule.num_microbatches + op.microbatch


# A comparison simulates many layouts of one shape, and writing the programs takes as long as running them. Two shapes at most:
# those of a thousand stages fill tens of megabytes.
@lru_cache(maxsize=2)
def programs(schedule: Schedule, overlap_p2p: bool) -> tuple[tuple[Instruction, ...], ...]:
    """By pp_rank: its instructions for one step, in order.

    `overlap_p2p` is Megatron's `overlap_p2p_comm`: transfers run beside the computation, but for the warm-up and the end.
    Raises ValueError for it where Megatron refuses it.
    """
    interleaved = schedule.num_virtual > 1
    if overlap_p2p and not interleaved:
        raise ValueError("overlap_p2p: expected virtual stages, got a schedule without (Megatron cannot overlap there)")
    if interleaved and not overlap_p2p and schedule.num_stages == 2:
        raise ValueError("overlap_p2p: expected at least 3 stages with virtual stages and without overlap, got 2")
    writers = [_Writer(schedule, pp_rank) for pp_rank in range(schedule.num_stages)]
    for writer in writers:
        if not interleaved:
            writer.write_plain()
        elif overlap_p2p:
            writer.write_overlapped()
        else:
            writer.write_batched()
    return tuple(tuple(writer.instructions) for writer in writers)


class _Writer:
    """Writes the program of one rank."""

    def __init__(self, schedule: Schedule, pp_rank: int) -> None:
        self.instructions: list[Instruction] = []
        self._schedule = schedule
        self._pp_rank = pp_rank
        self._num_slots = len(schedule.slots)
        self._num_warmup = schedule.num_warmup(pp_rank)
        self._num_steady = self._num_slots - self._num_warmup

    def write_plain(self) -> None:
        """Without virtual stages: every call sends and receives what it has to, and waits for all of it."""
        forward, backward, exchange = self._forward, self._backward, self._exchange
        num_warmup, num_slots = self._num_warmup, self._num_slots
        for slot in range(num_warmup):
            exchange(self._input(forward(slot)))
            self._compute(forward(slot))
            exchange(self._output(forward(slot)))
        if self._num_steady:
            exchange(self._input(forward(num_warmup)))
        for slot in range(self._num_steady):
            ahead = num_warmup + slot
            self._compute(forward(ahead))
            exchange(self._output(forward(ahead)), self._input(backward(slot)))
            self._compute(backward(slot))
            next_input = self._input(forward(ahead + 1)) if ahead + 1 < num_slots else []
            exchange(self._output(backward(slot)), next_input)
        if not self._schedule.forward_only:
            for slot in range(self._num_steady, num_slots):
                exchange(self._input(backward(slot)))
                self._compute(backward(slot))
                exchange(self._output(backward(slot)))

    def write_batched(self) -> None:
        """With virtual stages, no overlap: after each pair of operations one call for all four directions."""
        self._write_warmup(first_gradient=True)
        for slot in range(self._num_steady):
            ahead = self._num_warmup + slot
            forward, backward = self._forward(ahead), self._backward(slot)
            self._compute(forward)
            self._compute(backward)
            arriving = [*self._next_activation(ahead), *self._next_gradient(slot)]
            self._exchange(self._output(forward), self._output(backward), arriving)
        self._write_cooldown(deque())

    def write_overlapped(self) -> None:
        """With virtual stages and overlap: receives are posted ahead and waited for first come, first served.

        A rank pops one receive for each operation it runs, also where that is of a later micro-batch than it needs: the
        first rank with larger groups waits for tensors early.
        """
        self._write_warmup(first_gradient=False)
        activations: deque[int] = deque()
        gradients: deque[int] = deque()
        sent: list[int] = []
        if self._num_steady and self._num_warmup:
            gradients += self._post(self._input(self._backward(0)))
        for slot in range(self._num_steady):
            ahead = self._num_warmup + slot
            forward, backward = self._forward(ahead), self._backward(slot)
            self._wait_for_next(activations, forward)
            self._compute(forward)
            outgoing = self._post(self._output(forward))
            activations += self._post(self._next_activation(ahead))
            # Its memory is freed after the call, so this send is waited for at once, overlap or not.
            self._wait(outgoing)
            self._wait_for_next(gradients, backward)
            self._compute(backward)
            outgoing = self._post(self._output(backward))
            gradients += self._post(self._next_gradient(slot))
            self._wait(sent)
            sent = outgoing
        self._write_cooldown(gradients)
        self._wait(sent)

    def _write_warmup(self, *, first_gradient: bool) -> None:
        """Forwards only; each waits for its output to be taken and for the next input.

        The last of these calls also fetches the gradient of the first backward if `first_gradient`.
        """
        self._exchange(self._input(self._forward(0)))
        for slot in range(self._num_warmup):
            self._compute(self._forward(slot))
            arriving = self._next_activation(slot)
            if first_gradient and slot == self._num_warmup - 1 and self._num_steady:
                arriving = [*arriving, *self._input(self._backward(0))]
            self._exchange(self._output(self._forward(slot)), arriving)

    def _write_cooldown(self, gradients: deque[int]) -> None:
        """The backwards left over; `gradients` are receives under way, oldest first."""
        if self._schedule.forward_only:
            return
        if not self._num_steady:
            self._exchange(self._input(self._backward(0)))
        for slot in range(self._num_steady, self._num_slots):
            backward = self._backward(slot)
            self._wait_for_next(gradients, backward)
            self._compute(backward)
            self._exchange(self._output(backward), self._next_gradient(slot))

    def _next_activation(self, slot: int) -> list[int]:
        """What the rank receives after the forward of `slot`: on the first rank what the last one sends in that slot."""
        if slot == self._num_slots - 1:
            return []
        if self._pp_rank > 0:
            return self._input(self._forward(slot + 1))
        aligned = slot - (self._schedule.num_stages - 1)
        if aligned < 0:
            return []
        return self._output(self._schedule.forward(self._schedule.num_stages - 1, aligned))

    def _next_gradient(self, slot: int) -> list[int]:
        """What the rank receives after the backward of `slot`: on the last rank what the first one sends in that slot."""
        if slot == self._num_slots - 1:
            return []
        if self._pp_rank < self._schedule.num_stages - 1:
            return self._input(self._backward(slot + 1))
        aligned = slot - (self._schedule.num_stages - 1)
        return self._output(self._schedule.backward(0, aligned)) if aligned >= 0 else []

    def _forward(self, slot: int) -> Op:
        return self._schedule.forward(self._pp_rank, slot)

    def _backward(self, slot: int) -> Op:
        return self._schedule.backward(self._pp_rank, slot)

    def _input(self, op: Op) -> list[int]:
        """The message that `op` needs: one, or none at the ends of the model."""
        at_an_end = op.chunk == (0 if op.phase is Phase.FORWARD else self._schedule.num_chunks - 1)
        return [] if at_an_end else [number_of(self._schedule, op)]

    def _output(self, op: Op) -> list[int]:
        """The message that `op` gives, named by the operation that needs it: one, or none at the ends of the model."""
        chunk = op.chunk + (1 if op.phase is Phase.FORWARD else -1)
        if not 0 <= chunk < self._schedule.num_chunks:
            return []
        return [number_of(self._schedule, Op(phase=op.phase, chunk=chunk, microbatch=op.microbatch))]

    def _compute(self, op: Op) -> None:
        self.instructions.append((Do.COMPUTE, number_of(self._schedule, op)))

    def _exchange(self, *messages: Iterable[int]) -> None:
        """One call of Megatron's that waits: all is posted before anything is waited for."""
        for some in messages:
            self._post(some)
        for some in messages:
            self._wait(some)

    def _post(self, messages: Iterable[int]) -> list[int]:
        posted = list(messages)
        self.instructions += [(Do.POST, message) for message in posted]
        return posted

    def _wait(self, messages: Iterable[int]) -> None:
        self.instructions += [(Do.WAIT, message) for message in messages]

    def _wait_for_next(self, receives: deque[int], op: Op) -> None:
        """Wait for the oldest of `receives`, if `op` has an input at all and anything is under way."""
        if receives and self._input(op):
            self._wait([receives.popleft()])
