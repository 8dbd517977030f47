"""What the unit tests of routers share: a process group of one rank, and the CPU platform where Megatron is called."""

import pytest
import torch.distributed as dist

from megatron_dyn.host import cpu


@pytest.fixture
def one_rank():
    """A default gloo group with this process alone in it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def cpu_platform():
    """Megatron's optimizers name CUDA devices and CUDA tensor types; here they get the CPU."""
    with cpu.activate():
        yield
