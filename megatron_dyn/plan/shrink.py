"""How many stages a job needs: every smaller count priced against today's layout and the best one of today's size.

Pure. Used by the command and, in the running job, by the controller for its report. Releasing and taking ranks is not
decided here, only what it would cost in tokens per second.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_dyn.config import ShrinkGoal, ShrinkPolicy
from megatron_dyn.plan.job import Job, exact_split, plain_splits
from megatron_dyn.plan.problem import Split
from megatron_dyn.records import Layout, even_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The job on `num_stages` stages, the best layout there."""

    num_stages: int
    layout: Layout
    bottleneck_seconds: float
    """Slowest stage, one micro-batch."""
    step_seconds: float
    """Simulated, optimizer included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpackable:
    """A stage count at which the job cannot run."""

    num_stages: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Packings:
    """All smaller sizes of a job, beside its present one."""

    today: Packing
    """The layout as it is."""
    best: Packing
    """The best layout at today's size."""
    smaller: tuple[Packing | Unpackable, ...]
    """From one stage less down to one stage."""

    @property
    def fitting(self) -> tuple[Packing, ...]:
        """The smaller sizes at which the job can run."""
        return tuple(packing for packing in self.smaller if isinstance(packing, Packing))


def slowdown(packing: Packing, reference: Packing) -> float:
    """How much longer than `reference` a step takes: 0.33 is a third longer, all tokens of the job counted."""
    return packing.step_seconds / reference.step_seconds - 1.0 if reference.step_seconds else 0.0


def per_gpu(packing: Packing, reference: Packing) -> float:
    """Tokens per second and stage, as a multiple of `reference`'s."""
    seconds = packing.step_seconds * packing.num_stages
    return reference.step_seconds * reference.num_stages / seconds if seconds else 1.0


def packings(job: Job) -> Packings:
    """Price every smaller stage count; raises InfeasibleSplit when there is no split even at today's size.

    The last ranks go first (whole nodes from the end of the order), so ranks keep their speeds.
    """
    present = job.template
    smaller = tuple(_packed(job, count) for count in range(present.num_stages - 1, 0, -1))
    split = exact_split(job)
    return Packings(
        today=_packing(job, present),
        best=_packing(job, job.layout_of(split.counts)),
        smaller=smaller,
    )


def choose(sizes: Packings, policy: ShrinkPolicy) -> Packing | None:
    """The size to shrink to, or None to stay.

    `throughput:TOL`: the fewest stages that lose at most the fraction TOL of the tokens per second that the best layout
    at today's size would give. `efficiency`: the size with the most tokens per second and stage, if that is a smaller
    one. `memory`: the fewest stages whose memory suffices, whatever the speed.
    """
    fitting = sizes.fitting
    if not fitting or policy.goal is ShrinkGoal.OFF:
        return None
    if policy.goal is ShrinkGoal.MEMORY:
        return fitting[-1]
    if policy.goal is ShrinkGoal.THROUGHPUT:
        # One part in 1e9: sums of the same layers in another order must not decide over a GPU.
        kept = [size for size in fitting if sizes.best.step_seconds >= (1.0 - policy.tolerance - 1e-9) * size.step_seconds]
        return kept[-1] if kept else None
    leanest = max(fitting, key=lambda size: (per_gpu(size, sizes.best), size.num_stages))
    return leanest if per_gpu(leanest, sizes.best) > 1.0 + 1e-9 else None


def advise(job: Job, policy: ShrinkPolicy) -> str | None:
    """One line for people when `policy` would let stages go; None when it would not, or is off."""
    if policy.goal is ShrinkGoal.OFF:
        return None
    try:
        sizes = packings(job)
    except ValueError:
        # No split even at today's size, or a schedule that the simulator does not know: a run goes on without advice.
        return None
    chosen = choose(sizes, policy)
    if chosen is None:
        return None
    return (
        f"{chosen.num_stages} of {job.template.num_stages} stages would do under --dyn-shrink-policy {policy.text}: "
        f"{slowdown(chosen, sizes.best):+.1%} step time against the best layout of today's size, "
        f"{slowdown(chosen, sizes.today):+.1%} against today's layout, "
        f"{per_gpu(chosen, sizes.today):.2f} times the tokens per second and stage of today, at {chosen.layout.text}"
    )


def first_fit(stage_bytes: Sequence[int], cap_bytes: int) -> tuple[tuple[int, ...], ...]:
    """The paper's packing: groups of stages, merged in rank order wherever two fit one memory; loads are not looked at.

    A baseline (DynMo, `balancer/pack.py`: for each stage, the first later one whose memory together with its own stays
    below the cap takes its layers). Groups are in the order of the stage that is left; the order of layers is not kept,
    which is one reason why `packings` is what decides here.
    """
    held = list(stage_bytes)
    groups: list[list[int]] = [[stage] for stage in range(len(held))]
    for source in range(len(held)):
        for target in range(source + 1, len(held)):
            if held[source] + held[target] < cap_bytes:
                held[target] += held[source]
                groups[target] = groups[source] + groups[target]
                groups[source] = []
                break
    return tuple(tuple(group) for group in groups if group)


def _packing(job: Job, layout: Layout) -> Packing:
    return Packing(
        num_stages=layout.num_stages,
        layout=layout,
        bottleneck_seconds=max(job.workload.chunk_times(layout).stage_seconds),
        step_seconds=job.step_seconds_of([layout.counts[: job.num_open]])[0],
    )


def _packed(job: Job, num_stages: int) -> Packing | Unpackable:
    """The best layout found with as many chunks a stage as now, or, where Megatron refuses that, with one."""
    reasons = []
    for num_virtual in dict.fromkeys((job.template.num_virtual if num_stages > 1 else 1, 1)):
        try:
            smaller = _resized(job, num_stages, num_virtual)
            return _packing(smaller, smaller.layout_of(_quick_split(smaller).counts))
        except ValueError as error:
            reasons.append(str(error))
    return Unpackable(num_stages=num_stages, reason=reasons[0])


def _quick_split(job: Job) -> Split:
    """The exact split; with virtual stages, where that takes tenths of a second for each size, the better of two plain ones.

    It may miss a shorter step. So an advice to shrink promises too little rather than too much.
    """
    if job.template.num_virtual == 1:
        return exact_split(job)
    splits = plain_splits(job)
    return min(splits, key=lambda split: job.step_seconds_of([split.counts])[0])


def _resized(job: Job, num_stages: int, num_virtual: int) -> Job:
    """The job on its first `num_stages` stages with so many chunks each; nothing is where it was, so nothing is moved."""
    before, work = job.template, job.workload
    num_mtp = sum(chunk.num_mtp for chunk in before.chunks)
    p2p = work.p2p_seconds
    return replace(
        job,
        workload=replace(
            work,
            speeds=None if work.speeds is None else work.speeds[:num_stages],
            p2p_seconds=p2p if isinstance(p2p, int | float) else p2p[:num_stages] if num_virtual > 1 else p2p[: num_stages - 1],
        ),
        template=even_layout(before.num_layers, num_stages * num_virtual, num_stages, num_mtp=num_mtp),
        has_current=False,
    )
