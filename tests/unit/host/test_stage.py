"""The stage edited in place: what is left of a gradient buffer that is about to be freed."""

import gc
import weakref

import pytest
import torch

from megatron_dyn.host.stage import forget_gradient


def wrapped_parameter(dtype):
    """A parameter as Megatron's DDP and optimizer leave it after a step, and the gradient buffer it views."""
    buffer = torch.zeros(8)
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    parameter.main_grad = buffer[4:]
    if dtype is torch.float32:
        parameter.grad = parameter.main_grad
    else:
        parameter.main_param = torch.zeros(4)
        # Megatron's optimizer does this; converting fp32 to fp32 copies nothing.
        parameter.main_param.grad = parameter.main_grad.float()
        assert parameter.main_param.grad.data_ptr() == buffer[4:].data_ptr()
    return parameter, buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_buffer_is_let_go_by_the_parameter_and_by_its_fp32_copy(dtype):
    parameter, buffer = wrapped_parameter(dtype)
    main = getattr(parameter, "main_param", None)
    storage = weakref.ref(buffer.untyped_storage())
    forget_gradient(parameter)
    del buffer
    gc.collect()
    assert parameter.grad is None
    assert not hasattr(parameter, "main_grad")
    assert getattr(parameter, "main_param", None) is main
    assert main is None or main.grad is None
    assert storage() is None


def test_a_parameter_that_never_had_a_gradient_is_left_as_it_is():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.main_param = None
    forget_gradient(parameter)
    assert (parameter.grad, parameter.main_param, parameter.tolist()) == (None, None, [1.0, 1.0])
