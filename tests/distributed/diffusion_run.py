"""One rank of a diffusion over gloo: a stage of its own, and point-to-point messages to two neighbours.

Used by test_diffusion.py. The rank is given the costs of its own layers only.
"""

import pickle
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_dyn.plan.rivals.items import Item, Room, load_units
from megatron_dyn.plan.rivals.neighbours import Offer, Stage, diffuse_stage


class PointToPoint:
    """Implements Link with torch.distributed."""

    def __init__(self, neighbour: int) -> None:
        self.neighbour = neighbour

    def exchange(self, offer: Offer) -> Offer:
        content = torch.frombuffer(bytearray(pickle.dumps(offer)), dtype=torch.uint8)
        (length,) = self._swap(torch.tensor([len(content)]), 1)
        return pickle.loads(self._swap(content, int(length)).numpy().tobytes())

    def _swap(self, tensor: torch.Tensor, length: int) -> torch.Tensor:
        received = torch.empty(length, dtype=tensor.dtype)
        sending = dist.isend(tensor, self.neighbour)
        dist.recv(received, self.neighbour)
        sending.wait()
        return received


def diffuse(costs_by_rank: tuple[tuple[float, ...], ...], first_seconds: float, last_seconds: float) -> tuple[list[int], int]:
    """Loads of the layers that this rank ends with, and the number of phases."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    rank, size = dist.get_rank(), dist.get_world_size()
    ends = first_seconds * (rank == 0) + last_seconds * (rank == size - 1)
    items = [Item(load=load_units(seconds)) for seconds in costs_by_rank[rank]]
    stage = Stage(Room(load=load_units(ends)), items, num_stages=size)
    left = PointToPoint(rank - 1) if rank else None
    right = PointToPoint(rank + 1) if rank + 1 < size else None
    phases = diffuse_stage(stage, position=rank, left=left, right=right)
    dist.destroy_process_group()
    return [item.load for item in stage.items], phases
