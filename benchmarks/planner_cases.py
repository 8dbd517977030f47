"""The problems that `benchmarks.planner` gives to every algorithm: random ones, traces of six kinds of dynamic model, sizes.

All drawn from fixed seeds. Costs are seconds per micro-batch, of the order of milliseconds as in real jobs.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random

from megatron_dyn.cli.workloads import generate
from megatron_dyn.plan import SplitProblem
from megatron_dyn.records import Cost

FAMILIES = ("moe", "pruning", "freezing", "sparse-attention", "early-exit", "mixture-of-depths")
"""The six kinds of dynamic model, as `megatron-dyn simulate --kind` names them."""

NUM_RANDOM = 1_000
TRACE_STEPS = 20
TRACE_SHAPES = ((32, 8), (96, 16))
"""(layers, stages) of the traces."""
SIZES = tuple((4 * num_stages, num_stages) for num_stages in (8, 16, 32, 64, 128, 256, 512, 1024))
"""(layers, stages)."""
_MILLISECOND = 1e-3


def _uniform(random: Random) -> float:
    return random.uniform(0.5, 1.5)


def _lognormal(random: Random) -> float:
    return random.lognormvariate(0, 0.5)


def _bimodal(random: Random) -> float:
    return random.choice((1.0, 3.0)) * random.uniform(0.95, 1.05)


def _heavy_tail(random: Random) -> float:
    return min(random.paretovariate(1.5), 20.0)


def _few_values(random: Random) -> float:
    return float(random.randint(1, 4))


DISTRIBUTIONS: tuple[Callable[[Random], float], ...] = (_uniform, _lognormal, _bimodal, _heavy_tail, _few_values)


def random_problems(number: int = NUM_RANDOM, *, seed: int = 1) -> Iterator[SplitProblem]:
    """Two to 32 stages with one to eight layers each; every other one has layers that the stages divide."""
    random = Random(seed)
    for index in range(number):
        num_stages = random.choice((2, 4, 8, 16, 32))
        num_layers = num_stages * random.randint(1, 8)
        if index % 2:
            num_layers = random.randint(num_stages, 8 * num_stages)
        yield problem(random, num_layers, num_stages, DISTRIBUTIONS[index % len(DISTRIBUTIONS)])


def problem(random: Random, num_layers: int, num_stages: int, draw: Callable[[Random], float] = _lognormal) -> SplitProblem:
    """Layers of about a millisecond, an embedding of up to one layer, a head of up to three; parameters that say little."""
    return SplitProblem(
        layer_seconds=tuple(_MILLISECOND * draw(random) for _ in range(num_layers)),
        num_stages=num_stages,
        first_seconds=_MILLISECOND * random.uniform(0, 1),
        last_seconds=_MILLISECOND * random.uniform(0, 3),
        layer_parameters=tuple(random.randrange(90_000_000, 110_000_000) for _ in range(num_layers)),
    )


def without_ends(problems: Iterable[SplitProblem]) -> Iterator[SplitProblem]:
    """The same problems without embedding and head: all that DeepSpeed's functions ever see."""
    return (replace(problem, first_seconds=0.0, last_seconds=0.0) for problem in problems)


def sized_problem(num_layers: int, num_stages: int) -> SplitProblem:
    """The lognormal problem of one size."""
    return problem(Random(num_stages), num_layers, num_stages)


def trace(family: str, num_layers: int, num_stages: int) -> Iterator[SplitProblem]:
    """The job of one family over time: the same ends and parameters, other costs at every step.

    The traces are those of `megatron-dyn simulate --kind`, at TRACE_STEPS frames evenly spread over the run, or all of
    them where there are fewer, on layers that differ by a few per cent.
    """
    random = Random(f"{family} {num_layers} {num_stages}")
    base = problem(random, num_layers, num_stages)
    layers = [_jittered(random) for _ in range(num_layers)]
    frames = generate(family, layers, num_stages=num_stages).frames
    for index in sorted({round(turn * (len(frames) - 1) / (TRACE_STEPS - 1)) for turn in range(TRACE_STEPS)}):
        yield replace(base, layer_seconds=tuple(cost.seconds for cost in frames[index].layers))


def _jittered(random: Random) -> Cost:
    factor = random.uniform(0.97, 1.03)
    return Cost(
        forward_seconds=_MILLISECOND * factor / 3,
        backward_seconds=2 * _MILLISECOND * factor / 3,
        backward_weight_seconds=_MILLISECOND * factor / 3,
    )
