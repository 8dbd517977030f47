"""The paper's decentralised balancer made right: neighbours hand boundary layers to each other until no pair gains.

All stages of `neighbours` in one process, phase by phase. It ends at a local optimum: no run of layers handed over between
two neighbours makes the slower of them faster. That can be above the best split; how far is in docs/planner.md. It must not
know layouts or schedules.
"""

from collections.abc import Sequence
from itertools import accumulate, count, pairwise

from megatron_dyn.plan.problem import Split, SplitProblem
from megatron_dyn.plan.rivals.answers import NotApplicable, check_no_virtual, simple_bound_seconds
from megatron_dyn.plan.rivals.items import items_of
from megatron_dyn.plan.rivals.neighbours import Stage


def diffusion(problem: SplitProblem) -> Split:
    """Diffusion of the layers' times, from the current split, or from an even one where there is none.

    Never slower than where it starts. `Split.rounds` is the last phase in which a layer changed hands, 0 when none did; the
    distributed form needs as many phases more as there are stages, to know that it is over. Raises InfeasibleSplit for
    fewer layers than stages, NotApplicable for virtual stages, or when a stage that starts above the memory cap stays so.
    """
    return _diffuse(problem, "diffusion", by_parameters=False)


def diffusion_parameters(problem: SplitProblem) -> Split:
    """The same on the parameters of the layers, so times can get worse; raises NotApplicable also when not known."""
    return _diffuse(problem, "diffusion-parameters", by_parameters=True)


def starting_stages(problem: SplitProblem, *, by_parameters: bool = False) -> list[Stage]:
    """The stages as the diffusion starts; raises like `diffusion`.

    A current split that leaves a stage empty where none may be, or parts layers that belong together, gives way to the
    nearest that does not.
    """
    items = items_of(problem, by_parameters=by_parameters)
    num_layers, num_stages = len(problem.layer_seconds), problem.num_stages
    even = [(stage + 1) * num_layers // num_stages - stage * num_layers // num_stages for stage in range(num_stages)]
    spans = pairwise(accumulate(items.nearest_items(problem.current or even), initial=0))
    return [
        Stage(room, items.items[start:end], num_stages=num_stages)
        for room, (start, end) in zip(items.rooms, spans, strict=True)
    ]


def run_in_lock_step(stages: Sequence[Stage]) -> int:
    """Run all stages to the end; returns the last phase in which an item changed hands, 0 when none did.

    Pairs in which nothing has changed since they last met are left out: they would settle as before.
    """
    # By pair, named after its left stage.
    unsettled = [True] * (len(stages) - 1)
    last_move = 0
    for phase in count(1):
        if not any(unsettled):
            return last_move
        for left in range((phase + 1) % 2, len(stages) - 1, 2):
            if not unsettled[left]:
                continue
            unsettled[left] = False
            to_right, to_left = stages[left].offer(), stages[left + 1].offer()
            crossing = stages[left].meet_right(to_left)
            stages[left + 1].meet_left(to_right)
            if crossing:
                last_move = phase
                for other in (left - 1, left + 1):
                    if 0 <= other < len(unsettled):
                        unsettled[other] = True
    raise AssertionError("every move lowers the potential, so there is a last one")


def _diffuse(problem: SplitProblem, name: str, *, by_parameters: bool) -> Split:
    check_no_virtual(problem, name)
    stages = starting_stages(problem, by_parameters=by_parameters)
    rounds = run_in_lock_step(stages)
    over = [index for index, stage in enumerate(stages) if not stage.fits]
    if over:
        raise NotApplicable(f"{name}: stage {over[0]} starts above the memory cap and cannot get below it (exact may)")
    counts = [stage.room.pinned_layers + sum(item.num_layers for item in stage.items) for stage in stages]
    return problem.split(counts, bound_seconds=simple_bound_seconds(problem), rounds=rounds)
