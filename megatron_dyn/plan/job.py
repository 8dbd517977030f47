"""A planning task: a Workload, the stages it is to be split over, and what must hold; and its exact answer.

Used by `decide` in the running job and by `propose` outside. It turns a Job into the SplitProblem that algorithms take,
and their counts back into a Layout. It must not know ranks or clocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from megatron_dyn.plan.exact.partition import best_split
from megatron_dyn.plan.exact.refine import refine
from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.pipeline.predict import step_seconds_of
from megatron_dyn.plan.pipeline.schedule import in_flight_by_chunk
from megatron_dyn.plan.pipeline.simulator import pipeline_seconds_of
from megatron_dyn.plan.problem import Split, SplitProblem
from megatron_dyn.plan.rivals.answers import simple_bound_seconds
from megatron_dyn.plan.workload import Workload
from megatron_dyn.records import Cost, Layout

FloatArray = npt.NDArray[np.float64]

_MANY_CHUNKS = 8
"""Beyond this the split with even stages takes tenths of a second to find where stages have several chunks."""
_FEW_STAGES = 8
"""Up to here all splits that could be better are often few enough to try every one."""
_REFINE_OPERATIONS = 32_000
"""Operations simulated at most to find a shorter step: a few milliseconds. A count and not a time, so that all ranks stop at
the same candidate."""
_REFINE_OPERATIONS_FEW = 200_000
"""The same for few stages: up to a tenth of a second."""
_REFINE_OPERATIONS_ONE_BY_ONE = 300_000
"""The same where steps are simulated operation by operation: some ten milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A workload to be split over the chunks of a layout."""

    workload: Workload
    template: Layout
    """Number of stages and chunks, and where the embedding, MTP layers and the loss are. Its counts are the current ones."""
    has_current: bool = True
    """Whether the template's counts are where layers are now, so that moving them costs something."""
    min_layers: int = 1
    """The fewest decoder layers of a chunk: 0 or 1."""
    cap_bytes: int | None = None
    """The most a stage may need; None: no cap."""
    group_size: int | None = None
    """Micro-batches that go through one chunk before the next (--microbatch-group-size-per-virtual-pipeline-stage); None:
    Megatron's default, the number of stages."""
    layer_parameters: tuple[int, ...] | None = None
    """By layer: parameters, for the algorithms that balance those; None: bytes of state stand in for them."""
    pinned_first: int = 0
    """Leading layers that stay on the first chunk."""
    pinned_last: int = 0
    """Trailing layers that stay on the last open chunk, beyond the one that MTP layers hold there."""

    def __post_init__(self) -> None:
        """Refuse templates that do not fit; raises ValueError."""
        self.template.check_num_layers(len(self.workload.layers))
        if not self.template.chunks[0].embedding:
            first = self.template.chunks[0].text
            raise ValueError(f"layout {self.template.text!r}: expected the embedding on stage 0, got {first!r}")

    @property
    def num_open(self) -> int:
        """Leading chunks that may hold decoder layers: none may follow the loss or MTP layers.

        A running job cannot move its last decoder layer when there are MTP layers: Megatron builds the final norm beside
        it, and only there. Then the chunk that holds it is the last open one.
        """
        chunks = self.template.chunks
        if self.has_mtp and self.has_current:
            return 1 + self.template.last_chunk_with_layers
        return 1 + next(index for index, chunk in enumerate(chunks) if chunk.loss or chunk.num_mtp)

    @property
    def has_mtp(self) -> bool:
        """Whether there are MTP layers."""
        return any(chunk.num_mtp for chunk in self.template.chunks)

    @property
    def problem(self) -> SplitProblem:
        """What the algorithms are asked; raises ValueError for tables that do not fit together."""
        work, layout, num_open = self.workload, self.template, self.num_open
        sizes = tuple(cost.moved_bytes for cost in work.layers)
        parameters = self.layer_parameters or tuple(cost.state_bytes for cost in work.layers)
        shares_last_layer = self.has_mtp and (self.has_current or layout.chunks[num_open - 1].num_mtp > 0)
        return SplitProblem(
            layer_seconds=tuple(cost.seconds for cost in work.layers),
            num_stages=layout.num_stages,
            num_chunks=num_open,
            first_seconds=work.embedding.seconds,
            last_seconds=sum(cost.seconds for cost in self._ends_of(num_open - 1)),
            stage_seconds=self._stage_seconds(),
            speeds=work.speeds,
            uncut=work.uncut,
            pinned_first=self.pinned_first,
            pinned_last=max(self.pinned_last, 1 if shares_last_layer else 0),
            min_layers=self.min_layers,
            current=layout.counts[:num_open] if self.has_current else None,
            moved_bytes=sizes if any(sizes) else None,
            layer_parameters=parameters if any(parameters) else None,
            memory=None if self.cap_bytes is None else self._memory(self.cap_bytes),
        )

    def layout_of(self, counts: Sequence[int]) -> Layout:
        """The template with these decoder counts on its open chunks."""
        return self.template.with_counts([*counts, *(0 for _ in range(len(self.template.chunks) - len(counts)))])

    @property
    def needs_simulator(self) -> bool:
        """Whether steps have to be simulated operation by operation: chunks that interleave, or sends that take time."""
        p2p = self.workload.p2p_seconds
        return self.template.num_virtual > 1 or bool(p2p if isinstance(p2p, int | float) else any(p2p))

    def peak_bytes(self, counts: Sequence[int]) -> tuple[int, ...]:
        """By pp_rank: what the stage needs with these counts on the open chunks, by the rule that caps are held to."""
        work, layout = self.workload, self.layout_of(counts)
        in_flight = in_flight_by_chunk(work.num_microbatches, layout.num_stages, layout.num_virtual, self.group_size)
        pieces = zip(work.state_bytes(layout), work.activation_bytes(layout), in_flight, strict=True)
        needed = [state + held * activation for state, activation, held in pieces]
        return tuple(sum(needed[pp_rank :: layout.num_stages]) for pp_rank in range(layout.num_stages))

    def step_seconds_of(self, splits: Sequence[tuple[int, ...]]) -> list[float]:
        """By split: simulated step of each of these counts over the open chunks, optimizer included.

        The quick form of the simulator is used where it gives the same numbers.
        """
        work, layout = self.workload, self.template
        forward, backward = self._chunk_tables(splits)
        if self.needs_simulator:
            seconds = pipeline_seconds_of(
                forward,
                backward,
                work.chunk_times(layout).p2p_seconds,
                work.num_microbatches,
                num_stages=layout.num_stages,
                group_size=self.group_size,
            )
        else:
            seconds = step_seconds_of(forward, backward, work.num_microbatches, 0.0)
        by_split: list[float] = (seconds + self._optimizer_seconds(splits)).tolist()
        return by_split

    def _optimizer_seconds(self, splits: Sequence[tuple[int, ...]]) -> FloatArray:
        """[splits]: the slowest stage's optimizer; all stages wait for it."""
        by_chunk, num_stages = self._sums("optimizer_seconds", splits), self.template.num_stages
        return by_chunk.reshape(len(splits), -1, num_stages).sum(axis=1).max(axis=1)

    def _chunk_tables(self, splits: Sequence[tuple[int, ...]]) -> tuple[FloatArray, FloatArray]:
        """[splits, chunks] forward and backward seconds of one micro-batch."""
        other = self.workload.other_seconds / 2
        return self._sums("forward_seconds", splits, other), self._sums("backward_seconds", splits, other)

    def _sums(self, name: str, splits: Sequence[tuple[int, ...]], other: float = 0.0) -> FloatArray:
        """[splits, chunks]: this field of the costs, and `other`, summed over what each chunk holds, over its speed."""
        work, layout = self.workload, self.template
        num_chunks = len(layout.chunks)
        counts = np.zeros((len(splits), num_chunks), dtype=np.int64)
        counts[:, : self.num_open] = splits
        ends = counts.cumsum(axis=1)
        prefix = np.array([0.0, *(getattr(cost, name) for cost in work.layers)]).cumsum()
        fixed = [
            other + sum(getattr(cost, name) for cost in self._ends_of(index, embedding=True)) for index in range(num_chunks)
        ]
        speeds = np.array([work.speed(index % layout.num_stages) for index in range(num_chunks)])
        sums: FloatArray = (prefix[ends] - prefix[ends - counts] + np.array(fixed)) / speeds
        return sums

    def _ends_of(self, index: int, *, embedding: bool = False) -> list[Cost]:
        chunk, work = self.template.chunks[index], self.workload
        held = [work.mtp] * bool(chunk.num_mtp) + [work.head] * chunk.loss
        return held + [work.embedding] * (embedding and chunk.embedding)

    def _stage_seconds(self) -> tuple[float, ...] | None:
        """What each stage computes besides its layers and the ends on the first and the last open chunk."""
        layout = self.template
        seconds = [self.workload.other_seconds * layout.num_virtual] * layout.num_stages
        for index in range(self.num_open, len(layout.chunks)):
            seconds[index % layout.num_stages] += sum(cost.seconds for cost in self._ends_of(index))
        return tuple(seconds) if any(seconds) else None

    def _memory(self, cap_bytes: int) -> MemoryBudget:
        work, layout, num_open = self.workload, self.template, self.num_open
        in_flight = in_flight_by_chunk(work.num_microbatches, layout.num_stages, layout.num_virtual, self.group_size)

        def needed(costs: Sequence[Cost], index: int) -> int:
            return sum(cost.state_bytes + in_flight[index] * cost.activation_bytes for cost in costs)

        closed = [0] * layout.num_stages
        for index in range(num_open, len(layout.chunks)):
            closed[index % layout.num_stages] += needed(self._ends_of(index), index)
        return MemoryBudget(
            state_bytes=tuple(cost.state_bytes for cost in work.layers),
            activation_bytes=tuple(cost.activation_bytes for cost in work.layers),
            in_flight=in_flight[:num_open],
            first_bytes=needed([work.embedding], 0),
            last_bytes=needed(self._ends_of(num_open - 1), num_open - 1),
            rank_bytes=tuple(closed),
            cap_bytes=cap_bytes,
        )


def exact_split(job: Job) -> Split:
    """The split with the shortest simulated step that was found: proved where all that could be better are few.

    Pure and deterministic. Raises InfeasibleSplit when no split meets the constraints.
    """
    return exact_splits(job)[-1]


def exact_splits(job: Job) -> tuple[Split, Split]:
    """The first of `plain_splits`, and the split with the shortest step.

    Both are often the same. A step takes at least its slowest stage times the micro-batches, so only splits whose slowest
    stage stays below the first one's step over the micro-batches can have a shorter one: among those the second is sought.
    Pure and deterministic. Raises InfeasibleSplit when no split meets the constraints.
    """
    problem, layout, num_microbatches = job.problem, job.template, job.workload.num_microbatches
    plain, *others = _plain_splits(job, problem)
    shortest_possible = num_microbatches * plain.bottleneck_seconds
    if not shortest_possible:
        return plain, plain
    refined = refine(
        plain,
        problem,
        job.step_seconds_of,
        slack=max(0.0, job.step_seconds_of([plain.counts])[0] / shortest_possible - 1.0),
        budget=_operations_allowed(job) // (2 * num_microbatches * len(layout.chunks)),
        more_starts=[other.counts for other in others],
    )
    return plain, refined


def plain_splits(job: Job) -> tuple[Split, ...]:
    """Without any search for a shorter step: the split with even stages and, with virtual stages, that with even chunks.

    Of many chunks only the latter, which is found in a millisecond: with several chunks a stage, even stages take tenths of
    a second. Raises InfeasibleSplit when no split meets the constraints, or none was found in the first place.
    """
    return _plain_splits(job, job.problem)


def _plain_splits(job: Job, problem: SplitProblem) -> tuple[Split, ...]:
    if job.template.num_virtual == 1:
        return (best_split(problem),)
    even = problem.split(_even_chunks(problem), bound_seconds=simple_bound_seconds(problem))
    fits = job.cap_bytes is None or max(job.peak_bytes(even.counts)) <= job.cap_bytes
    if fits and len(job.template.chunks) > _MANY_CHUNKS:
        return (even,)
    return (best_split(problem), even) if fits else (best_split(problem),)


def _operations_allowed(job: Job) -> int:
    if job.needs_simulator:
        return _REFINE_OPERATIONS_ONE_BY_ONE
    return _REFINE_OPERATIONS_FEW if job.template.num_stages <= _FEW_STAGES else _REFINE_OPERATIONS


def _even_chunks(problem: SplitProblem) -> tuple[int, ...]:
    """The split whose slowest chunk is fastest, whatever its stages sum to: interleaving wants chunks alike.

    It need not respect a memory cap. There is one, since `problem` has a split.
    """
    assert problem.num_chunks is not None
    speeds, num_chunks = problem.speeds, problem.num_chunks
    by_chunk = None if speeds is None else tuple(speeds[chunk % problem.num_stages] for chunk in range(num_chunks))
    return best_split(replace(problem, num_stages=num_chunks, speeds=by_chunk, stage_seconds=None, memory=None)).counts
