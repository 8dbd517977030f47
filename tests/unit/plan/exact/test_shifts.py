"""Shifting boundaries never makes a split worse than asked, never breaks a constraint, and undoes what does not help."""

from itertools import product
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.plan.exact.shifts import Shifts
from megatron_dyn.plan.exact.tables import Tables, tables_of, with_ties
from megatron_dyn.plan.memory import MemoryBudget
from megatron_dyn.plan.problem import SplitProblem
from tests.unit.plan.brute_force import PATIENT


def random_tables(random: Random, *, capped: bool) -> Tables:
    """24 layers over three chunks on each of four stages, one of them slow."""
    num_layers = 24
    layers = tuple(random.choice([1.0, 1.5, 4.0]) for _ in range(num_layers))
    memory = MemoryBudget(
        state_bytes=tuple(random.randint(5, 9) for _ in range(num_layers)),
        activation_bytes=(1,) * num_layers,
        in_flight=tuple(range(12, 0, -1)),
        cap_bytes=110,
    )
    return tables_of(
        SplitProblem(
            layer_seconds=layers,
            num_stages=4,
            num_chunks=12,
            last_seconds=2.0,
            speeds=(1.0, 0.5, 1.0, 1.0),
            current=(2,) * 12,
            moved_bytes=tuple(random.randint(1, 9) for _ in range(num_layers)),
            memory=memory if capped else None,
        )
    )


def random_ends(random: Random, tables: Tables) -> tuple[int, ...]:
    """Any split without empty chunks."""
    inner = random.sample(range(1, tables.num_items), tables.num_chunks - 1)
    return (*sorted(inner), tables.num_items)


@settings(PATIENT, max_examples=30)
@given(st.randoms(use_true_random=False), st.booleans())
def test_every_step_keeps_what_it_promises(random: Random, capped: bool) -> None:
    """Faster, then fewer moved bytes at the same speed, then fewer bytes; the sums kept on the way are right."""
    tables = random_tables(random, capped=capped)
    shifts = Shifts(tables, random_ends(random, tables), max_steps=3000)
    before = shifts.ends
    if not shifts.repair():
        assert capped and not tables.allows(before, tables.longest())
        return
    assert tables.allows(shifts.ends, tables.longest())
    start = shifts.peak
    shifts.hasten(0)
    assert shifts.peak == tables.peak(shifts.ends) <= start
    bound, moved = with_ties(shifts.peak), tables.moved(shifts.ends)
    shifts.settle(bound)
    assert tables.moved(shifts.ends) <= moved
    fullest = shifts.peak_bytes
    shifts.lighten(bound)
    assert max(tables.bytes_held(shifts.ends)) == shifts.peak_bytes <= fullest
    assert tables.allows(shifts.ends, bound)
    shifts.shake(random)
    assert shifts.peak == tables.peak(shifts.ends)
    assert min(tables.counts(shifts.ends)) >= 1


@settings(PATIENT, max_examples=20)
@given(st.randoms(use_true_random=False), st.integers(0, 40))
def test_work_is_bounded_and_the_same_each_time(random: Random, max_steps: int) -> None:
    """A search that runs out of steps leaves a split that is allowed."""
    tables = random_tables(random, capped=False)
    start = random_ends(random, tables)
    first, second = (Shifts(tables, start, max_steps=max_steps) for _ in range(2))
    first.hasten(0)
    second.hasten(0)
    assert first.ends == second.ends
    assert first.steps_left >= 0
    assert tables.allows(first.ends, tables.peak(start))


UNEVEN = tables_of(SplitProblem(layer_seconds=(4.0, 4.0, 2.0, 1.0, 4.0, 1.0, 4.0), num_stages=2, num_chunks=4))
"""Stage 0 has 8 + 4, stage 1 has 3 + 5 at the cuts 2, 4, 5."""


def test_a_chain_finds_what_single_shifts_do_not() -> None:
    """A layer given away makes the other stage slower than this one is; giving 4 for 2 helps both."""
    for boundary, step in product(range(3), (1, -1)):
        ends = [2, 4, 5, 7]
        ends[boundary] += step
        assert not UNEVEN.allows(ends, UNEVEN.peak((2, 4, 5, 7)) - 1)
    shifts = Shifts(UNEVEN, (2, 4, 5, 7), max_steps=1000)
    shifts.hasten(0)
    assert (UNEVEN.seconds(UNEVEN.peak((2, 4, 5, 7))), UNEVEN.seconds(shifts.peak)) == (12.0, 10.0)


def test_a_bound_that_is_out_of_reach_is_reported() -> None:
    """`slow_to` says so."""
    assert Shifts(UNEVEN, (2, 4, 5, 7), max_steps=1000).slow_to(UNEVEN.peak((2, 4, 5, 7)) - 1)
    assert not Shifts(UNEVEN, (2, 4, 5, 7), max_steps=1000).slow_to(0)
