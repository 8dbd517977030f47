"""Whatever names a CUDA device ends up on the CPU."""

import pytest
import torch

from megatron_dyn.host.cpu.torch_mode import CPU, CpuMode, cpu_instead


@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1), 0, 3])
def test_cuda_means_cpu(device):
    assert cpu_instead(device) == CPU


@pytest.mark.parametrize("value", [None, "cpu", torch.device("meta"), True, torch.float32, "cudaish"])
def test_everything_else_is_left_alone(value):
    assert cpu_instead(value) is value


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1.0], device=torch.device("cuda", 0)),
        lambda: torch.empty(2, device=0, pin_memory=True),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(0),
        lambda: torch.zeros(2).to("cuda", torch.bfloat16, True),
        lambda: torch.zeros(2).to(device="cuda", dtype=torch.bfloat16),
        lambda: torch.zeros(2).to(torch.zeros(1)),
        lambda: torch.empty_like(torch.zeros(2), device="cuda"),
    ],
)
def test_tensors_are_made_on_the_cpu(make):
    with CpuMode():
        assert make().device == CPU


def test_other_devices_can_still_be_named():
    with CpuMode():
        assert torch.zeros(2, device="meta").is_meta
