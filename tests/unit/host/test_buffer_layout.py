"""Which elements a rank will own: over the ranks of a group every element has one owner, whatever the buckets."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_dyn.host import buffer_layout as module
from megatron_dyn.host import legacy
from megatron_dyn.host.buffer_layout import buffer_layout, owned_ranges, takes_layout
from megatron_dyn.host.compat import HostError


def group(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def ddp_of(rank, size, *, expert=(0, 1), bucket_size=None, pp_rank=0):
    """As much of a DDP object as its layout depends on: rank `rank` of `size`, rank and size among its experts' replicas."""
    return SimpleNamespace(
        pp_group=group(pp_rank, 4),
        intra_dp_cp_group=group(rank, size),
        intra_expt_dp_group=group(*expert),
        ddp_config=DistributedDataParallelConfig(use_distributed_optimizer=True, bucket_size=bucket_size),
    )


def owned_by(rank, size, parameters, *, bucketed=True, **options):
    """What that rank would own."""
    ddp = ddp_of(rank, size, **options)
    return owned_ranges(ddp, buffer_layout(ddp, parameters, bucketed=bucketed))


def parameter(*shape, dtype=torch.bfloat16, expert=False):
    """Shape and dtype without storage: data is not read."""
    made = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    made.allreduce = not expert
    return made


def covered(parameters, owned_by_rank):
    """Whether the ranges of all ranks tile every parameter."""
    for each in parameters:
        reached = 0
        for start, end in sorted(owned[each] for owned in owned_by_rank if each in owned):
            if start != reached or start >= end:
                return False
            reached = end
        if reached != each.numel():
            return False
    return True


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=2), min_size=1, max_size=6),
    size=st.integers(1, 5),
    bucket_size=st.none() | st.integers(1, 500),
    halves=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_over_the_ranks_of_a_group_every_element_has_one_owner(shapes, size, bucket_size, halves):
    dtypes = [torch.bfloat16 if half else torch.float32 for half in halves]
    parameters = [parameter(*shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    owned = [owned_by(rank, size, parameters, bucket_size=bucket_size) for rank in range(size)]
    assert covered(parameters, owned)


def test_experts_are_shared_out_among_their_own_replicas():
    parameters = [parameter(30), parameter(50, expert=True)]
    # Four replicas of the dense parameters, two of the experts'.
    owned = [owned_by(rank, 4, parameters, expert=(rank // 2, 2)) for rank in range(4)]
    assert covered(parameters[:1], owned)
    assert covered(parameters[1:], owned[::2])
    assert owned[0][parameters[1]] == owned[1][parameters[1]]


@pytest.mark.parametrize(
    ("changes", "in_buckets"), [({}, True), ({"bucketed": False}, False), ({"pp_rank": 1}, False)], ids=str
)
def test_buckets_are_as_megatron_makes_them_on_this_stage_and_chunk(changes, in_buckets):
    parameters = [parameter(128), parameter(128)]
    owned = owned_by(0, 2, parameters, bucket_size=100, **changes)
    # In buckets of its own each parameter is halved; in one bucket the first rank owns the last parameter, which comes first.
    assert owned == ({each: (0, 64) for each in parameters} if in_buckets else {parameters[1]: (0, 128)})


def test_the_order_of_the_model_counts():
    first, second = parameter(128), parameter(128)
    assert list(owned_by(0, 2, [first, second])) == [second]
    assert list(owned_by(0, 2, iter([second, first]))) == [first]


@pytest.mark.parametrize("bucket_size", [None, 100])
def test_a_release_that_lays_out_no_buffers_ahead_is_stood_in_for_alike(monkeypatch, bucket_size):
    parameters = [parameter(90), parameter(130), parameter(70, expert=True), parameter(11, dtype=torch.float32)]
    options = {"bucket_size": bucket_size, "expert": (1, 2)}
    expected = [owned_by(rank, 3, parameters, **options) for rank in range(3)]
    assert takes_layout()
    monkeypatch.delattr(DistributedOptimizer, "compute_full_param_layout")
    with pytest.raises(HostError, match="compute_full_param_layout does not exist; megatron-core 0.19"):
        takes_layout()
    monkeypatch.setattr(module, "megatron_version", lambda: "0.17.1")
    assert not takes_layout()
    asked = []
    monkeypatch.setattr(
        legacy, "full_param_layout", lambda *args, own=legacy.full_param_layout, **kw: asked.append(1) or own(*args, **kw)
    )
    assert [owned_by(rank, 3, parameters, **options) for rank in range(3)] == expected
    assert len(asked) == 3
