"""The exact min-max split of a sequence of layers over pipeline stages, with the fewest moved bytes among the best.

Called by `decide` and by offline tools with a SplitProblem; answers with a Split. It must not know layouts, micro-batch
schedules or measurement. The search runs on integers, so there is no rounding on which two ranks could differ.
"""

from dataclasses import replace
from itertools import accumulate

from megatron_dyn.plan.exact.closest import closest_counts
from megatron_dyn.plan.exact.floors import time_floor
from megatron_dyn.plan.exact.interleaved import interleaved_split
from megatron_dyn.plan.exact.sweep import ByteTable, Sweep
from megatron_dyn.plan.exact.tables import Tables, tables_of, with_ties
from megatron_dyn.plan.problem import InfeasibleSplit, Split, SplitProblem


def best_split(problem: SplitProblem) -> Split:
    """The split with the fastest slowest stage and, of all that reach it (to 1e-12 relative), the fewest moved bytes.

    Memory is a cap, not a price: with a current split, a layer that moves only to even out memory costs a transfer and
    saves no time, so under the cap the fewest moved bytes decide. Without a current split nothing moves, and the lowest
    peak memory of any stage decides, if there is a memory table. Ties after that: the split whose first boundary is
    closest to the current one, then the lower boundary; then the same for the second boundary, and so on. Without a
    current split: the smallest counts in lexicographic order. A current split that cuts where this is not allowed is
    only a place to be close to; moved layers and bytes are always those from the real one.

    With at most one chunk per stage the answer is exact. With virtual stages it is exact where the tree of splits is
    small enough; beyond that it is what a search found, and `bound_seconds` is a proved lower bound.
    Pure and deterministic. Raises InfeasibleSplit when no split meets the constraints.
    """
    tables = tables_of(problem)
    _check_feasible(problem, tables)
    if problem.num_runs > problem.num_stages:
        ends, bound = interleaved_split(tables)
        proved = tables.peak(ends) <= with_ties(bound)
        return problem.split(tables.counts(ends), bound_seconds=None if proved else tables.seconds(bound))
    sweep = _sweep_of(tables)
    found = sweep.fastest(time_floor(tables), tables.longest())
    if found is None:
        raise InfeasibleSplit(_over_cap(problem, tables, sweep))
    bound = with_ties(found[0])
    if tables.homes is None and sweep.memory is not None:
        sweep = replace(sweep, memory=replace(sweep.memory, cap_bytes=sweep.leanest(bound)))
    counts = closest_counts(sweep, bound=bound, held=tables.held, places=tables.cuts, old=tables.old)
    return problem.split(tables.counts(tuple(accumulate(counts))))


def _sweep_of(tables: Tables) -> Sweep:
    """The walk over all chunks, where each is alone on its stage."""
    num_chunks = tables.num_chunks
    memory = None
    if tables.needed is not None:
        memory = ByteTable(needed=tables.needed, fixed=tables.fixed_bytes[:num_chunks], cap_bytes=tables.cap_bytes)
    return Sweep(
        prefix=tables.prefix,
        fixed=tables.fixed[:num_chunks],
        rates=tables.rates[:num_chunks],
        least=tables.least,
        memory=memory,
    )


def _check_feasible(problem: SplitProblem, tables: Tables) -> None:
    """Refuse what no search has to look at: too few layers, and stages that are full without any."""
    num_needed, num_runs = sum(tables.least), problem.num_runs
    if tables.num_items < num_needed:
        pieces = "layers" if tables.num_items == len(problem.layer_seconds) else "runs of layers that may be cut apart"
        holders = f"{num_runs} stages" if num_runs == problem.num_stages else f"{num_runs} chunks"
        each = f"one for each of {holders}" if num_needed == num_runs else f"for the pinned layers on {holders}"
        raise InfeasibleSplit(f"expected at least {num_needed} {pieces}, {each}, got {tables.num_items}")
    if problem.memory is None:
        return
    for stage, held_bytes in enumerate(tables.fixed_bytes):
        if held_bytes > problem.memory.cap_bytes:
            raise InfeasibleSplit(
                f"expected at most {problem.memory.cap_bytes} bytes on each stage, got {held_bytes} on stage "
                f"{stage} before it holds any layer"
            )


def _over_cap(problem: SplitProblem, tables: Tables, sweep: Sweep) -> str:
    """Which stage or layer breaks the cap. Only for problems without a split."""
    memory, table, last = problem.memory, sweep.memory, problem.num_runs - 1
    assert memory is not None and table is not None, "without a cap every problem with enough layers has a split"
    for item in range(tables.num_items):
        needed = {stage: table.fixed[stage] + _item_bytes(table, stage, item) for stage in _possible(problem, tables, item)}
        stage = min(needed, key=lambda stage: (needed[stage], stage))
        if needed[stage] > memory.cap_bytes:
            return _too_many_bytes(tables, table, stage, item, item + 1, "where it needs the fewest")
    start, filled = 0, "with the stages filled in order"
    for stage in range(last):
        end = min(table.end(stage, start), tables.num_items - sum(tables.least[stage + 1 :]))
        if end < start + tables.least[stage]:
            return _too_many_bytes(tables, table, stage, start, start + 1, filled)
        start = end
    return _too_many_bytes(tables, table, last, start, tables.num_items, filled)


def _possible(problem: SplitProblem, tables: Tables, item: int) -> range:
    """Stages that may hold an item."""
    if item == 0 and problem.pinned_first:
        return range(1)
    first = problem.num_runs - 1 if item == tables.num_items - 1 and problem.pinned_last else 0
    return range(first, problem.num_runs)


def _item_bytes(table: ByteTable, stage: int, item: int) -> int:
    return int(table.needed[stage, item + 1] - table.needed[stage, item])


def _too_many_bytes(tables: Tables, table: ByteTable, stage: int, first: int, last: int, when: str) -> str:
    start, end = int(tables.cuts[first]), int(tables.cuts[last])
    held = f"layer {start}" if end - start == 1 else f"layers {start}..{end - 1}"
    needed = table.fixed[stage] + int(table.needed[stage, last] - table.needed[stage, first])
    return f"expected at most {table.cap_bytes} bytes on each stage, got {needed} on stage {stage} for {held}, {when}"
