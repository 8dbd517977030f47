"""The diffusion on real processes that talk to their neighbours only ends at the split of the planner, all at once."""

import random
from itertools import accumulate, pairwise

from megatron_dyn.plan import SplitProblem
from megatron_dyn.plan.algorithms import ALGORITHMS
from megatron_dyn.plan.rivals.items import load_units
from megatron_dyn.testing.ranks import run_ranks
from tests.distributed.diffusion_run import diffuse


def parts(values, counts):
    return [values[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def test_neighbour_messages_alone_give_the_planners_split():
    costs = random.Random(7)
    layers = tuple(costs.lognormvariate(0, 1) * 1e-3 for _ in range(24))
    start = (21, 1, 1, 1)
    problem = SplitProblem(layer_seconds=layers, num_stages=4, first_seconds=1e-3, last_seconds=3e-3, current=start)
    split = ALGORITHMS["diffusion"].solve(problem)
    assert split.rounds > 2
    found = run_ranks(diffuse, 4, tuple(parts(layers, start)), 1e-3, 3e-3, timeout_seconds=60)
    loads = [load_units(seconds) for seconds in layers]
    assert [items for items, _ in found] == parts(loads, split.counts)
    assert {phases for _, phases in found} == {split.rounds + 4}
