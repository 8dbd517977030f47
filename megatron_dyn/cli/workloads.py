"""Traces of layer costs that change while a model trains: the six dynamic kinds, and three that test when not to move.

Pure and seeded: the same arguments give the same trace on any machine. Parameters are those of the papers where they
are known (docs/simulate.md names each source). It must not know layouts, files or how a split is found.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from megatron_dyn.cli.freeze import frozen_costs
from megatron_dyn.config import MeasureConfig
from megatron_dyn.measure import is_sampled
from megatron_dyn.plan.workload import Workload
from megatron_dyn.records import Cost, Layout

DEFAULT_MICROBATCHES = 32
"""Of a step, where nobody says: global batch 64 in micro-batches of 2, as in the DynMo scripts."""
LAYER = Cost(
    forward_seconds=0.005,
    backward_seconds=0.010,
    backward_weight_seconds=0.005,
    state_bytes=18 * 12 * 1024**2,
    activation_bytes=34 * 512 * 2 * 1024,
    moved_bytes=14 * 12 * 1024**2,
)
"""A layer of the DynMo scripts: hidden 1024, sequence 512, micro-batch 2; bf16 with Adam. The times are round numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """Costs from iteration `step` (1-based) on, until the next frame."""

    step: int
    layers: tuple[Cost, ...]
    """By global layer id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """How the costs of one job change over its run. Frames are ascending and the first holds from iteration 1."""

    frames: tuple[Frame, ...]
    num_steps: int
    num_microbatches: int
    """Of a step."""
    embedding: Cost = Cost()
    head: Cost = Cost()
    p2p_seconds: float = 0.0
    layout: Layout | None = None
    """The layout that the run starts at; None: not said."""

    @property
    def num_layers(self) -> int:
        """Decoder layers of the model."""
        return len(self.frames[0].layers)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Iterations that each frame holds for."""
        starts = [1, *(frame.step for frame in self.frames[1:]), self.num_steps + 1]
        return tuple(end - start for start, end in zip(starts, starts[1:], strict=False))

    def workload(self, frame: int) -> Workload:
        """What the job costs while the frame with this index holds."""
        return Workload(
            layers=self.frames[frame].layers,
            embedding=self.embedding,
            head=self.head,
            num_microbatches=self.num_microbatches,
            p2p_seconds=self.p2p_seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """How large the job is."""

    num_layers: int
    num_steps: int
    num_stages: int
    """Only for the kinds that are made to mislead a planner: they put their load where the even split has a stage."""


Shares = Iterator[tuple[int, list[float]]]
"""(first iteration, by layer the share of its full cost that is left) in ascending order."""
Frames = Iterator[Frame]


def generate(
    kind: str,
    layers: Sequence[Cost],
    *,
    num_stages: int,
    num_steps: int | None = None,
    num_microbatches: int = DEFAULT_MICROBATCHES,
    seed: int = 0,
) -> Trace:
    """The trace of one of KINDS over `num_steps` (None: as many as its paper has) for layers that cost `layers` at full load.

    Raises ValueError for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"generate: expected one of {', '.join(KINDS)}, got {kind!r}")
    extent = Extent(num_layers=len(layers), num_steps=num_steps or KINDS[kind].num_steps, num_stages=num_stages)
    frames: list[Frame] = []
    for frame in KINDS[kind].frames(extent, random.Random(seed), layers):
        if frames and frames[-1].step == frame.step:
            # A run so short that two changes come before the same step.
            frames.pop()
        if frame.step <= extent.num_steps and (not frames or frame.layers != frames[-1].layers):
            frames.append(frame)
    return Trace(frames=tuple(frames), num_steps=extent.num_steps, num_microbatches=num_microbatches)


def _by_share(shares: Callable[[Extent, random.Random], Shares]) -> Callable[[Extent, random.Random, Sequence[Cost]], Frames]:
    """Frames from a generator of shares."""

    def frames(extent: Extent, rng: random.Random, layers: Sequence[Cost]) -> Frames:
        for step, row in shares(extent, rng):
            yield Frame(step=step, layers=tuple(_scaled(cost, share) for cost, share in zip(layers, row, strict=True)))

    return frames


def _scaled(cost: Cost, share: float) -> Cost:
    return replace(
        cost,
        forward_seconds=cost.forward_seconds * share,
        backward_seconds=cost.backward_seconds * share,
        backward_weight_seconds=cost.backward_weight_seconds * share,
    )


def _steps(extent: Extent, every: int) -> range:
    return range(1, extent.num_steps + 1, every)


def _moe(extent: Extent, rng: random.Random) -> Shares:
    """Top-2 of 8 experts, one on each expert rank: a layer is as slow as its busiest expert. Skew differs by layer, drifts."""
    num_experts, expert_share, memory = 8, 2 / 3, 0.98
    spread = [rng.uniform(0.1, 0.6) for _ in range(extent.num_layers)]
    logits = [[rng.gauss(0.0, width) for _ in range(num_experts)] for width in spread]
    for step in _steps(extent, 1):
        factors = []
        for row in logits:
            weights = [math.exp(value) for value in row]
            # No expert gets a token twice, so with top-2 none gets more than half of the assignments.
            busiest = min(max(weights) / math.fsum(weights), 0.5) * num_experts
            factors.append(1.0 - expert_share + expert_share * busiest)
        yield step, factors
        for row, width in zip(logits, spread, strict=True):
            row[:] = [memory * value + rng.gauss(0.0, width * math.sqrt(1 - memory**2)) for value in row]


def _pruning(extent: Extent, rng: random.Random) -> Shares:
    """Global magnitude pruning to 90 % by a cubic schedule: at 30, 40, ... 70 % of the run, which is 3000..7000 of 10,000."""
    final_sparsity, dense_share, num_prunes = 0.9, 0.2, 4
    # One threshold for all layers: those with smaller weights lose more of them.
    scales = [math.exp(rng.gauss(0.0, 0.35)) for _ in range(extent.num_layers)]
    yield 1, [1.0] * extent.num_layers
    for prune in range(1, num_prunes + 1):
        sparsity = final_sparsity * (1 - (1 - prune / num_prunes) ** 3)
        step = 1 + round(extent.num_steps * (0.3 + 0.1 * prune))
        yield step, [dense_share + (1 - dense_share) * density for density in _densities(scales, 1 - sparsity)]


def _densities(scales: list[float], density: float) -> list[float]:
    """By layer the share of normal weights with these scales above the threshold that leaves `density` of all."""

    def left(threshold: float) -> list[float]:
        return [math.erfc(threshold / scale / math.sqrt(2)) for scale in scales]

    low, high = 0.0, 10 * max(scales)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.fsum(left(middle)) > density * len(scales) else (low, middle)
    return left(high)


def _freezing(extent: Extent, rng: random.Random, layers: Sequence[Cost]) -> Frames:
    """Front to back: judged 20 times in a run, a quarter of the layers still training freezes in the mean, a quarter never."""
    num_frozen = 0
    yield Frame(step=1, layers=tuple(layers))
    for judgement in range(2, 20):
        candidates = int(0.75 * extent.num_layers) - num_frozen
        num_new = sum(rng.random() < 0.25 for _ in range(candidates))
        if num_new:
            num_frozen += num_new
            yield Frame(step=1 + extent.num_steps * judgement // 20, layers=frozen_costs(layers, range(num_frozen)))


def _sparse_attention(extent: Extent, rng: random.Random) -> Shares:
    """Attention is 70 % of a layer at long sequences; the share of it that hashing leaves differs by layer and wanders."""
    attention_share, memory, width = 0.7, 0.9, 0.4
    centres = [math.log(rng.betavariate(2.0, 5.0) + 0.02) for _ in range(extent.num_layers)]
    wander = [0.0] * extent.num_layers
    for step in _steps(extent, 10):
        densities = (min(1.0, math.exp(centre + moved)) for centre, moved in zip(centres, wander, strict=True))
        yield step, [1 - attention_share + attention_share * density for density in densities]
        wander = [memory * value + rng.gauss(0.0, width * math.sqrt(1 - memory**2)) for value in wander]


def _early_exit(extent: Extent, rng: random.Random) -> Shares:
    """Tokens leave after each quarter of the layers, more and more: in the end 100, 80, 60 and 40 % of them are still there."""
    final = (1.0, 0.8, 0.6, 0.4)
    for step in _steps(extent, 100):
        progress = min(1.0, step / (0.6 * extent.num_steps))
        survival = [1 - progress * (1 - share) * rng.uniform(0.9, 1.0) for share in final]
        if progress == 1.0:
            survival = list(final)
        yield step, [survival[layer * len(final) // extent.num_layers] for layer in range(extent.num_layers)]


def _mixture_of_depths(extent: Extent, _rng: random.Random) -> Shares:
    """Every other layer takes an eighth of the tokens. That never changes."""
    yield 1, [1.0 if layer % 2 == 0 else 0.125 for layer in range(extent.num_layers)]


def _stage_layers(extent: Extent, stage: int) -> range:
    """The layers that an even split gives to `stage`."""
    return range(extent.num_layers * stage // extent.num_stages, extent.num_layers * (stage + 1) // extent.num_stages)


def _hot(extent: Extent, layers: range) -> list[float]:
    return [2.0 if layer in layers else 1.0 for layer in range(extent.num_layers)]


def _stationary_skew(extent: Extent, _rng: random.Random) -> Shares:
    """The layers of the first stage cost twice as much, always: one move."""
    yield 1, _hot(extent, _stage_layers(extent, 0))


def _rotating_hot_spot(extent: Extent, _rng: random.Random) -> Shares:
    """The layers of one stage after the other cost twice as much, for 3 steps each: no move would be worth it for long."""
    for turn, step in enumerate(_steps(extent, 3)):
        yield step, _hot(extent, _stage_layers(extent, turn % extent.num_stages))


def _burst(extent: Extent, _rng: random.Random) -> Shares:
    """One step costs twice as much on the first stage: no move. It is one that a job samples, else nobody would be misled.

    Of the steps that are sampled at the default interval it is the one nearest to the middle of the run. A run that is
    too short to have one has no burst.
    """
    interval, middle = MeasureConfig().interval_steps, (extent.num_steps + 1) // 2
    # Each interval has one sampled step, so the nearest is at most two intervals away.
    near = range(max(1, middle - 2 * interval), min(extent.num_steps, middle + 2 * interval) + 1)
    sampled = [step for step in near if is_sampled(step, interval)]
    yield 1, [1.0] * extent.num_layers
    if sampled:
        step = min(sampled, key=lambda step: abs(step - middle))
        yield step, _hot(extent, _stage_layers(extent, 0))
        yield step + 1, [1.0] * extent.num_layers


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of workload."""

    summary: str
    frames: Callable[[Extent, random.Random, Sequence[Cost]], Frames]
    num_steps: int
    """Iterations of a run unless the user says otherwise."""


KINDS: Mapping[str, Kind] = {
    "moe": Kind("expert routing: skew differs by layer and drifts at every step", _by_share(_moe), 1_000),
    "pruning": Kind("gradual global magnitude pruning to 90 % in four prunes", _by_share(_pruning), 10_000),
    "freezing": Kind("layers freeze front to back", _freezing, 10_000),
    "sparse-attention": Kind("the share of attention that is computed wanders, by layer", _by_share(_sparse_attention), 1_000),
    "early-exit": Kind("ever more tokens leave before the last layers", _by_share(_early_exit), 10_000),
    "mixture-of-depths": Kind("every other layer takes an eighth of the tokens", _by_share(_mixture_of_depths), 1_000),
    "stationary-skew": Kind("one stage is twice as heavy throughout: worth one move", _by_share(_stationary_skew), 1_000),
    "rotating-hot-spot": Kind("a hot spot that soon moves on: worth none", _by_share(_rotating_hot_spot), 1_000),
    "one-step-burst": Kind("one slow step, and a job samples it: worth none", _by_share(_burst), 1_000),
}
"""By the name that `simulate --kind` takes."""
