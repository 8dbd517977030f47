"""The control plane on real gloo ranks: answers by rank, and ranks that are not at the same point."""

import importlib

import pytest

from megatron_dyn.testing.ranks import run_ranks


def meet(*names):
    """Meet once for each name that this rank is given; returns the answers or the error."""
    dist = importlib.import_module("torch.distributed")
    dist.init_process_group("gloo")
    collective = importlib.import_module("megatron_dyn.host.collective").GlooCollective(timeout_seconds=20.0)
    try:
        return collective.gather(collective.rank * 10, names[collective.rank])
    except importlib.import_module("megatron_dyn.ports").JobError as error:
        return str(error)


def test_every_rank_gets_every_answer_in_rank_order():
    assert run_ranks(meet, 3, "votes", "votes", "votes") == [[0, 10, 20]] * 3


@pytest.mark.parametrize("names", [("samples", "votes"), ("votes", "plan and manifests")])
def test_ranks_at_different_points_are_told_so_on_every_rank(names):
    for rank, told in enumerate(run_ranks(meet, 2, *names)):
        assert told.startswith(f"rank {rank}: ranks are at different points of a round: ")
        assert all(name in told for name in names)
