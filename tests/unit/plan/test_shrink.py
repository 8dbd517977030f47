"""Fewer stages: priced against today and against the best of today's size, and chosen by policy."""

from dataclasses import replace

import pytest

from megatron_dyn.config import ShrinkPolicy
from megatron_dyn.plan import Job, Packing, Unpackable, Workload, advise, choose, first_fit, packings, per_gpu, slowdown
from megatron_dyn.records import Cost, Layout

MANY = 4_000
"""Micro-batches: so many that a step is the slowest stage, and fill and drain do not count."""


def job(seconds: list[tuple[float, float]], counts: list[int], **changes: object) -> Job:
    """(forward, backward) seconds by layer."""
    layers = tuple(Cost(forward_seconds=forward, backward_seconds=backward) for forward, backward in seconds)
    workload = Workload(layers=layers, num_microbatches=MANY)
    return replace(Job(workload=workload, template=Layout.contiguous(counts)), **changes)


C7 = job([(1.0, 0.0)] * 8 + [(1.0, 2.0)] * 16, [6, 6, 6, 6])
"""The first 8 of 24 layers frozen."""
C16 = job([(share / 3, share * 2 / 3) for share in (1.0, 0.8, 0.6, 0.4) for _ in range(8)], [8, 8, 8, 8])
"""Early exit: a share of the tokens survives each block of 8 layers."""


SIZES_C7 = packings(C7)


def at(sizes: object, num_stages: int) -> Packing:
    return next(size for size in sizes.fitting if size.num_stages == num_stages)  # type: ignore[attr-defined]


def test_case_c7_costs_a_third_against_rebalanced_and_a_ninth_against_today() -> None:
    sizes = SIZES_C7
    assert (sizes.today.bottleneck_seconds, sizes.best.bottleneck_seconds) == (18.0, 15.0)
    three = at(sizes, 3)
    assert three.bottleneck_seconds == 20.0
    assert slowdown(three, sizes.best) == pytest.approx(1 / 3, abs=1e-3)
    assert slowdown(three, sizes.today) == pytest.approx(1 / 9, abs=1e-3)


def test_case_c16_loses_nothing_against_today_and_a_third_against_rebalanced() -> None:
    sizes = packings(C16)
    assert sizes.today.bottleneck_seconds == pytest.approx(8.0)
    assert sizes.best.bottleneck_seconds == pytest.approx(6.0)
    assert at(sizes, 3).bottleneck_seconds == pytest.approx(8.0)
    assert slowdown(at(sizes, 3), sizes.today) == pytest.approx(0.0, abs=1e-3)
    assert slowdown(at(sizes, 3), sizes.best) == pytest.approx(1 / 3, abs=1e-3)
    assert per_gpu(at(sizes, 3), sizes.today) == pytest.approx(4 / 3, abs=1e-3)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("off", None),
        ("throughput:0", None),
        ("throughput:0.2", None),
        ("throughput:0.26", 3),
        ("throughput:0.5", 2),
        ("throughput:0.76", 1),
        ("memory", 1),
    ],
)
def test_policies(policy: str, expected: int | None) -> None:
    chosen = choose(SIZES_C7, ShrinkPolicy.parse(policy))
    assert (chosen and chosen.num_stages) == expected


def test_efficiency_shrinks_only_where_a_stage_more_is_worth_less_than_a_stage() -> None:
    even = job([(1.0, 2.0)] * 12, [3, 3, 3, 3], workload=Workload(layers=C7.workload.layers[-12:], num_microbatches=MANY))
    sizes = packings(even)
    # Fewer stages mean a shorter fill: a little more for each.
    assert choose(sizes, ShrinkPolicy.parse("efficiency")).num_stages == 1  # type: ignore[union-attr]
    uneven = job([(1.0, 2.0), (10.0, 20.0), (1.0, 2.0), (1.0, 2.0)], [1, 1, 1, 1])
    chosen = choose(packings(uneven), ShrinkPolicy.parse("efficiency"))
    assert chosen is not None and chosen.num_stages == 1
    assert per_gpu(chosen, packings(uneven).best) > 3.0


def test_sizes_without_room_are_named_and_never_chosen() -> None:
    layers = tuple(Cost(forward_seconds=1.0, state_bytes=100) for _ in range(8))
    crowded = job([(1.0, 0.0)] * 8, [2, 2, 2, 2], workload=Workload(layers=layers, num_microbatches=MANY), cap_bytes=300)
    sizes = packings(crowded)
    assert [size.num_stages for size in sizes.fitting] == [3]
    assert [size.num_stages for size in sizes.smaller if isinstance(size, Unpackable)] == [2, 1]
    assert choose(sizes, ShrinkPolicy.parse("memory")) == at(sizes, 3)
    assert "300 bytes" in next(size.reason for size in sizes.smaller if isinstance(size, Unpackable))


def test_ranks_that_stay_keep_their_speeds() -> None:
    slow = replace(C7, workload=replace(C7.workload, speeds=(0.5, 1.0, 1.0, 1.0), p2p_seconds=(0.0, 0.0, 0.0)))
    assert at(packings(slow), 1).bottleneck_seconds == 112.0


def test_virtual_stages_stay_as_many() -> None:
    virtual = replace(C7, template=Layout.contiguous([3] * 8, num_stages=4), workload=replace(C7.workload, num_microbatches=12))
    sizes = packings(virtual)
    assert [size.layout.num_virtual for size in sizes.fitting] == [2, 2, 1]
    # 8 micro-batches in groups of 3 are refused by Megatron: then without virtual stages.
    eight = replace(virtual, workload=replace(virtual.workload, num_microbatches=8))
    assert [size.layout.num_virtual for size in packings(eight).fitting] == [1, 2, 1]


def test_advice_names_both_comparisons() -> None:
    advice = advise(C7, ShrinkPolicy.parse("throughput:0.3"))
    assert advice is not None
    assert advice.startswith(
        "3 of 4 stages would do under --dyn-shrink-policy throughput:0.3: +33.3% step time against the best"
    )
    assert "+11.1% against today's layout" in advice
    assert advise(C7, ShrinkPolicy.parse("throughput:0.1")) is None
    assert advise(C7, ShrinkPolicy()) is None


def test_the_papers_first_fit_looks_at_memory_alone() -> None:
    # 8 stages of 3 layers on 4: the merged stages hold 6 layers, whatever they cost.
    assert [len(group) for group in first_fit([3] * 8, 7)] == [2, 2, 2, 2]
    assert first_fit([3, 3, 3], 3) == ((0,), (1,), (2,))
