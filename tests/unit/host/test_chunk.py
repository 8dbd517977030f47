"""One chunk edited in place: its list of layers, and what is left of a gradient buffer that is about to be freed."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from megatron_dyn.host.chunk import ModelChunk, StageError, forget_gradient


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


class Layer(torch.nn.Module):
    """As much of a layer of Megatron's as a chunk looks at."""

    def __init__(self, layer):
        super().__init__()
        self.layer_number = layer + 1


def chunk_of(*layers, index=0, **ddp):
    """A chunk around a block with these layers, without Megatron's constructors."""
    chunk = ModelChunk.__new__(ModelChunk)
    modules = torch.nn.ModuleList(Layer(layer) for layer in layers)
    chunk.block = SimpleNamespace(layers=modules, num_layers_per_pipeline_rank=len(layers))
    chunk.ddp, chunk.index = SimpleNamespace(**ddp), index
    return chunk


class TestLayers:
    def test_they_are_known_by_global_id_in_order(self):
        chunk = chunk_of(4, 5)
        assert list(chunk.layers) == [4, 5]
        assert chunk.layers[5] is chunk.block.layers[1]

    def test_other_layers_take_the_place_of_those_that_were_there_and_are_counted(self):
        chunk = chunk_of(4, 5)
        stays, comes = chunk.block.layers[1], Layer(6)
        chunk.set_layers([stays, comes])
        assert list(chunk.layers.values()) == [stays, comes]
        assert (list(chunk.layers), chunk.block.num_layers_per_pipeline_rank) == ([5, 6], 2)
        chunk.set_layers([])
        assert (list(chunk.layers), chunk.block.num_layers_per_pipeline_rank) == ([], 0)

    def test_a_chunk_that_stays_as_it_is_keeps_its_very_list(self):
        chunk = chunk_of(4, 5)
        modules = chunk.block.layers
        chunk.set_layers(list(modules))
        assert chunk.block.layers is modules
        chunk.set_layers(list(modules)[:1])
        assert chunk.block.layers is not modules

    def test_a_look_at_other_layers_leaves_those_that_were_there(self, monkeypatch):
        chunk = chunk_of(4, 5)
        modules, other = chunk.block.layers, Layer(9)
        other.weight, other.frozen = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2), requires_grad=False)

        def parameters():
            return (parameter for layer in chunk.block.layers for parameter in layer.parameters())

        chunk.ddp.module = SimpleNamespace(parameters=parameters)
        monkeypatch.setattr("megatron_dyn.host.chunk.buffer_layout", lambda ddp, parameters, *, bucketed: list(parameters))
        (seen,) = chunk.layout_with([other])
        assert seen is other.weight
        assert chunk.block.layers is modules

        def failing():
            raise RuntimeError("while looking")

        chunk.ddp.module = SimpleNamespace(parameters=failing)
        with pytest.raises(RuntimeError, match="while looking"):
            chunk.layout_with([other])
        assert chunk.block.layers is modules

    @pytest.mark.parametrize(("index", "bucketed"), [(0, True), (1, False)])
    def test_only_the_first_chunk_of_a_rank_has_several_buckets(self, monkeypatch, index, bucketed):
        chunk = chunk_of(4, index=index, module=torch.nn.Module())
        monkeypatch.setattr("megatron_dyn.host.chunk.buffer_layout", lambda ddp, parameters, *, bucketed: bucketed)
        assert chunk.layout_with([]) is bucketed


class TestWrapping:
    @pytest.mark.parametrize("overlap", [False, True])
    def test_parameters_are_gathered_only_where_that_is_put_off(self, overlap):
        calls = []

        def start_param_sync(**options):
            calls.append((options, torch.is_grad_enabled()))

        config = SimpleNamespace(overlap_param_gather=overlap)
        chunk_of(ddp_config=config, start_param_sync=start_param_sync).sync_parameters()
        assert calls == [({"force_sync": True}, False)] * overlap

    @pytest.mark.parametrize(("handles", "expected"), [({}, False), ({"layer": "handle"}, True), (None, False)])
    def test_hooks_are_on_while_megatron_holds_their_handles(self, handles, expected):
        assert chunk_of(**({} if handles is None else {"remove_forward_pre_hook_handles": handles})).hooks_on is expected

    def test_what_is_no_ddp_object_is_refused_by_its_class(self):
        with pytest.raises(StageError, match="chunk 1: expected a DistributedDataParallel, got a Linear"):
            ModelChunk(torch.nn.Linear(1, 1), 1)
