"""Execute with sharded optimizer state: ranges reach their new owners bit by bit, over all ranks, or nothing moves at all."""

import re
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dyn.migrate import Shard, ShardKey, ShardNote, plan_ranges
from megatron_dyn.ports import CollectiveTimeout
from megatron_dyn.testing.fakes import MemoryStore, small_layer
from megatron_dyn.testing.faults import Faults, Operation
from tests.unit.migrate.pipelines import Pipelines, assert_same, plan_of

WEIGHT, NORM = ShardKey("layer 3", "weight", "tp 0"), ShardKey("stage 1 chunk 0", "norm.weight", "tp 0")
SIZES = {WEIGHT: 40, NORM: 12}
DTYPES = {"main": torch.float32, "optimizer:exp_avg": torch.bfloat16}
HELD = [{WEIGHT: (0, 25)}, {WEIGHT: (25, 40)}, {NORM: (0, 7)}, {NORM: (7, 12)}]
WANTED = [{}, {}, {WEIGHT: (0, 10), NORM: (0, 12)}, {WEIGHT: (10, 40)}]
"""By rank of two pipelines of two stages: layer 3 leaves ranks 0 and 1, and rank 3's part of the norm goes to rank 2."""
PLAN = plan_of([4, 4], [3, 5])


def whole(key):
    """All elements of a parameter's optimizer state, by kind; any bits, NaNs among them."""
    generator = torch.Generator().manual_seed(SIZES[key])
    bits = {kind: torch.randint(0, 256, (SIZES[key] * dtype.itemsize,), generator=generator) for kind, dtype in DTYPES.items()}
    return {kind: bits[kind].to(torch.uint8).view(dtype) for kind, dtype in DTYPES.items()}


def shard(key, start, end, *, kinds=tuple(DTYPES)):
    noted = tuple((kind, str(DTYPES[kind]).removeprefix("torch.")) for kind in kinds)
    note = ShardNote(start=start, end=end, kinds=noted, facts=(key.name, {"step": 7.0}))
    return Shard(note=note, tensors={kind: tensor[start:end] for kind, tensor in whole(key).items() if kind in kinds})


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


class ShardedStore(MemoryStore):
    """Also holds shards, and says what it wants to hold or raises; remembers which layers it was told of."""

    def __init__(self, rank, layers, held, wanted, *, faults=None):
        super().__init__(rank, layers, faults=faults)
        self.held, self.wanted, self.told = held, wanted, None

    def shards(self, plan):
        return self.held

    def outline(self, plan, arriving):
        self.told = arriving
        if isinstance(self.wanted, Exception):
            raise self.wanted
        return self.wanted


def job_of(held=HELD, wanted=WANTED, *, plan=PLAN, faults=None, kinds=tuple(DTYPES), **options):
    """Two pipelines, unless `held` is of another number of ranks."""
    job = Pipelines(plan, num_replicas=len(held) // plan.before.num_stages, faults=faults, **options)
    job.stores = [
        ShardedStore(
            store.rank,
            store.layers,
            {key: shard(key, *borders, kinds=kinds) for key, borders in held[store.rank].items()},
            wanted[store.rank],
            faults=faults,
        )
        for store in job.stores
    ]
    return job


def assert_arrived(staged, moves, rank, kinds=tuple(DTYPES)):
    """`staged` holds what `moves` bring to `rank`, bit by bit, and nothing else."""
    expected = {(move.key, move.start, move.end) for move in moves if move.destination == rank}
    assert sorted((key, start) for key, ranges in staged.ranges.items() for start, _ in ranges) == sorted(
        (key, start) for key, start, _ in expected
    )
    for key, start, end in expected:
        (tensors,) = [tensors for first, tensors in staged.ranges[key] if first == start]
        assert tuple(tensors) == kinds
        for kind, tensor in tensors.items():
            assert (tensor.dtype, raw(tensor)) == (DTYPES[kind], raw(whole(key)[kind][start:end]))


def nothing_moved(job, results):
    assert all((staged.states, staged.ranges, staged.wanted) == ({}, {}, {}) for staged in results)
    assert all((staged.receipt.sent_bytes, staged.receipt.received_bytes) == (0, 0) for staged in results)
    assert all((staged.receipt.sent_layers, staged.receipt.received_layers) == ((), ()) for staged in results)
    return len(job.mailbox) == 0 and all(wire.sent == wire.received == {} for wire in job.wires)


class TestArrival:
    @pytest.mark.parametrize("bucket_bytes", [1, 7, 50, 1 << 20])
    def test_layers_and_ranges_arrive_equal_with_the_facts_in_any_buckets(self, bucket_bytes):
        job = job_of(bucket_bytes=bucket_bytes)
        results, moves = job.run(), plan_ranges(HELD, WANTED)
        for rank, staged in enumerate(results):
            assert staged.receipt.problem is None
            assert_arrived(staged, moves, rank)
            assert staged.wanted == WANTED[rank]
            assert staged.facts == {key: (key.name, {"step": 7.0}) for key in SIZES}
            assert list(staged.states) == [3] * (rank >= 2)
            for state in staged.states.values():
                assert_same(state, small_layer(3))
        assert len(job.mailbox) == 0

    def test_what_stays_does_not_travel_and_bytes_are_counted(self):
        job = job_of()
        receipts = [staged.receipt for staged in job.run()]
        per_element = sum(dtype.itemsize for dtype in DTYPES.values())
        layer = sum(tensor.numel() * tensor.element_size() for tensor in small_layer(3).tensors.values())
        assert [receipt.sent_bytes for receipt in receipts] == [
            layer + 25 * per_element,
            layer + 15 * per_element,
            0,
            5 * per_element,
        ]
        assert [receipt.received_bytes for receipt in receipts] == [
            0,
            0,
            layer + 15 * per_element,
            layer + 30 * per_element,
        ]

    def test_every_rank_is_told_of_the_layers_that_arrive_there(self):
        job = job_of()
        job.run()
        assert [list(store.told) for store in job.stores] == [[], [], [3], [3]]
        assert job.stores[2].told[3].scalars == small_layer(3).scalars

    def test_live_shards_are_read_only(self):
        job = job_of()
        job.run()
        for store, ranges in zip(job.stores, HELD, strict=True):
            for key, (start, end) in ranges.items():
                live = store.held[key].tensors
                assert all(raw(live[kind]) == raw(whole(key)[kind][start:end]) for kind in DTYPES)

    def test_shards_move_where_no_layer_does(self):
        # A layer that changes its place among the chunks of its own stage shifts the borders of all.
        held, wanted = [{WEIGHT: (0, 25)}, {WEIGHT: (25, 40)}], [{WEIGHT: (0, 5)}, {WEIGHT: (5, 40)}]
        job = job_of(held, wanted, plan=plan_of([4, 4], [4, 4]))
        results = job.run()
        for rank, staged in enumerate(results):
            assert_arrived(staged, plan_ranges(held, wanted), rank)

    @pytest.mark.parametrize("plan", [PLAN, plan_of([4, 4], [4, 4])], ids=["with a layer", "alone"])
    def test_shards_without_a_tensor_arrive_too(self, plan):
        # fp32 parameters before the first step of an optimizer that makes its moments then.
        held, wanted = [{WEIGHT: (0, 25)}, {WEIGHT: (25, 40)}], [{}, {WEIGHT: (0, 40)}]
        sender, receiver = job_of(held, wanted, plan=plan, kinds=()).run()
        assert (sender.receipt.problem, receiver.receipt.problem) == (None, None)
        assert receiver.ranges == {WEIGHT: [(0, {})]}

    @settings(max_examples=20)
    @given(data=st.data())
    def test_any_owners_before_and_after(self, data):
        def owners():
            """Four ranks part each parameter, in any order and at any borders."""
            ranges = [{} for _ in range(4)]
            for key, size in SIZES.items():
                cuts = sorted(data.draw(st.lists(st.integers(0, size), min_size=3, max_size=3)))
                order = data.draw(st.permutations(range(4)))
                for rank, start, end in zip(order, [0, *cuts], [*cuts, size], strict=True):
                    if start < end:
                        ranges[rank][key] = (start, end)
            return ranges

        held, wanted = owners(), owners()
        results = job_of(held, wanted, bucket_bytes=data.draw(st.integers(8, 200))).run()
        for rank, staged in enumerate(results):
            assert staged.receipt.problem is None
            assert_arrived(staged, plan_ranges(held, wanted), rank)


class TestFailure:
    def test_a_flipped_bit_in_a_range_is_a_problem_that_names_the_sender(self):
        # Rank 3 sends nothing but its part of the norm.
        faults = Faults().plan(Operation.CORRUPT, 3)
        results = job_of(faults=faults).run()
        assert faults.struck == [(Operation.CORRUPT, 3)]
        problems = [staged.receipt.problem for staged in results]
        assert problems[2].startswith("optimizer shards from rank 3: checksum differs, expected 0x")
        assert "; " not in problems[2]
        assert (problems[0], problems[1], problems[3]) == (None, None, None)
        assert (results[2].states, results[2].ranges, results[2].wanted) == ({}, {}, {})

    def test_a_rank_that_cannot_outline_says_so_and_all_see_nothing_moved(self):
        job = job_of(wanted=[{}, RuntimeError("no layout"), *WANTED[2:]])
        started = time.monotonic()
        results = job.run()
        assert time.monotonic() - started < job.world.timeout_seconds / 2
        told = "planning the optimizer's shards failed: RuntimeError: no layout"
        assert [staged.receipt.problem for staged in results] == [None, told, None, None]
        assert nothing_moved(job, results)

    def test_shards_that_do_not_add_up_are_told_by_all_before_anything_moves(self):
        job = job_of([*HELD[:3], {NORM: (8, 12)}])
        results = job.run()
        told = (
            "making room failed: RangeError: optimizer state of stage 1 chunk 0 norm.weight (tp 0): "
            "expected one holder of elements 7 to 12, got 8 to 12"
        )
        assert [staged.receipt.problem for staged in results] == [told] * 4
        assert nothing_moved(job, results)

    def test_a_rank_whose_shards_cannot_be_had_says_so_and_all_see_nothing_moved(self):
        job = job_of()

        def failing(plan):
            raise RuntimeError("no shards")

        job.stores[3].shards = failing
        results = job.run()
        problems = [staged.receipt.problem for staged in results]
        assert problems == [None, None, None, "export failed: RuntimeError: no shards"]
        assert nothing_moved(job, results)

    def test_a_range_that_never_arrives_ends_in_errors_that_name_who_is_waited_for(self):
        job = job_of(faults=Faults().plan(Operation.LOSE, 3), timeout_seconds=0.3)
        results = job.run()
        assert [type(error) for error in results] == [CollectiveTimeout] * 4
        assert "from rank 3: nothing in 0.3 s" in str(results[2])
        assert re.match(r"rank 0: digests of what was sent: ranks \[.*2.*\] absent", str(results[0]))
