"""The stage over its chunks: how every rank learns how each layer is built, and how layers are dealt out anew."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from megatron_dyn.host.chunk import StageError
from megatron_dyn.host.stage import StageModel, _mark_slices, share_specs
from megatron_dyn.ports import JobError
from megatron_dyn.records import Layout
from megatron_dyn.testing.threads import ThreadCollective, ThreadWorld


class Unpicklable:
    """Refuses to be pickled with the error it is given."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        raise self.error


class FakeChunk:
    """A chunk that only notes its layers."""

    def __init__(self, index, layers):
        self.index, self.given = index, None
        self.layers = {layer: f"module {layer}" for layer in layers}
        self.has_embedding, self.has_head = index == 0, index == 1
        self.ddp = torch.nn.Linear(1, 1, bias=False)

    def set_layers(self, modules):
        self.given = modules


def stage_of(*chunks, pp_rank=0, specs=None):
    """A StageModel over fake chunks, without Megatron's groups."""
    stage = StageModel.__new__(StageModel)
    stage.chunks = [FakeChunk(index, layers) for index, layers in enumerate(chunks)]
    stage.pp_rank, stage._specs = pp_rank, specs or {}
    return stage


class TestSpecs:
    def shared(self, *specs_by_rank):
        """Each rank's stage after sharing, or the error that it met."""
        world = ThreadWorld(len(specs_by_rank))
        stages = [stage_of(specs=specs) for specs in specs_by_rank]

        def share(rank):
            share_specs(stages[rank], ThreadCollective(world, rank))
            return stages[rank]

        results = world.run(share)
        assert world.num_meetings == 1
        return results

    def test_every_rank_learns_the_specs_of_all_layers(self):
        stages = self.shared({0: "dense", 1: "moe"}, {2: "dense", 3: "moe"}, {0: "dense", 1: "moe"})
        assert [stage.specs for stage in stages] == [{0: "dense", 1: "moe", 2: "dense", 3: "moe"}] * 3

    def test_a_rank_keeps_its_own_specs_themselves(self):
        own = SimpleNamespace(module="here")
        here, _ = self.shared({0: own}, {0: SimpleNamespace(module="there"), 1: SimpleNamespace(module="there")})
        assert here.specs[0] is own
        assert here.specs[1] == SimpleNamespace(module="there")

    def test_a_stage_without_layers_learns_too(self):
        _, empty = self.shared({0: "dense"}, {})
        assert empty.specs == {0: "dense"}

    @pytest.mark.parametrize(
        "spec",
        [
            lambda: None,
            Unpicklable(TypeError("cannot pickle a handle")),
            Unpicklable(RuntimeError("no copy")),
            (lambda: None, "of two"),
        ],
        ids=["a lambda", "a handle", "an object that minds", "a lambda inside"],
    )
    @pytest.mark.parametrize("rank", [0, 2])
    def test_a_spec_that_cannot_be_sent_ends_the_job_on_all_ranks_with_the_same_line(self, spec, rank):
        specs = [{0: "dense"}, {1: "dense"}, {2: "dense"}]
        specs[rank] = {rank: "dense", 7: spec}
        results = self.shared(*specs)
        assert [type(error) for error in results] == [StageError] * 3
        assert len({str(error) for error in results}) == 1
        assert str(results[0]).startswith(f"rank {rank}: the specs of layers [{rank}, 7] cannot be sent: ")
        assert "\n" not in str(results[0])
        assert isinstance(results[0], JobError)

    def test_every_rank_whose_specs_cannot_be_sent_is_named(self):
        results = self.shared({0: lambda: None}, {1: lambda: None})
        assert all("rank 0: " in str(error) and "; rank 1: " in str(error) for error in results)


class TestLayers:
    # Two stages of two chunks: stage 0 holds layers 0, 1 and 4, stage 1 holds 2, 3 and 5.
    BEFORE = Layout.contiguous([2, 2, 1, 1], num_stages=2)

    def test_those_of_all_chunks_are_known_by_global_id_in_order(self):
        stage = stage_of([4], [0, 1])
        assert list(stage.layers) == [0, 1, 4]

    def test_the_ends_may_be_in_any_chunk(self):
        stage = stage_of([0], [4])
        assert (stage.has_embedding, stage.has_head) == (True, True)
        stage = stage_of([0])
        assert (stage.has_embedding, stage.has_head) == (True, False)

    def test_parameters_come_chunk_by_chunk(self):
        stage = stage_of([0], [4])
        expected = [chunk.ddp.weight for chunk in stage.chunks]
        assert all(found is wanted for found, wanted in zip(stage.parameters(), expected, strict=True))

    def test_every_chunk_is_dealt_the_layers_that_the_layout_says(self):
        after = Layout.contiguous([1, 1, 2, 2], num_stages=2)
        stage, modules = stage_of([0, 1], [4]), {layer: f"module {layer}" for layer in range(6)}
        stage.deal(after, modules)
        assert [chunk.given for chunk in stage.chunks] == [["module 0"], ["module 2", "module 3"]]
        stage = stage_of([2, 3], [5], pp_rank=1)
        stage.deal(after, modules)
        assert [chunk.given for chunk in stage.chunks] == [["module 1"], ["module 4", "module 5"]]

    def test_a_layer_that_is_not_here_cannot_be_dealt(self):
        stage = stage_of([0, 1], [4])
        with pytest.raises(StageError, match=r"stage 0: layers \[3\] of layout 'Et\|t\|t\*2\|t\*2L' are not here: \[0, 2\]"):
            stage.deal(Layout.contiguous([1, 1, 2, 2], num_stages=2), {0: "module 0", 2: "module 2"})

    @pytest.mark.parametrize(
        ("after", "pp_rank", "touched"),
        [
            ([2, 2, 1, 1], 0, []),
            ([1, 3, 1, 1], 0, [0]),
            ([1, 3, 1, 1], 1, [0]),
            ([2, 1, 2, 1], 0, [1]),
            ([1, 2, 2, 1], 1, [0]),
            ([2, 2, 0, 2], 1, [1]),
            ([1, 2, 1, 2], 0, [0, 1]),
        ],
    )
    def test_touched_are_the_chunks_whose_layers_change(self, after, pp_rank, touched):
        stage = stage_of([0, 1], [4], pp_rank=pp_rank)
        chunks = stage.touched(self.BEFORE, Layout.contiguous(after, num_stages=2))
        assert [chunk.index for chunk in chunks] == touched


@pytest.mark.parametrize(("kind", "dimension"), [(ColumnParallelLinear, 0), (RowParallelLinear, 1)])
def test_weights_that_are_built_without_values_are_marked_as_slices(kind, dimension):
    """As megatron-core 0.17 leaves them: without the mark the gradient norm counts one tensor-parallel rank alone."""
    linear = kind.__new__(kind)
    torch.nn.Module.__init__(linear)
    linear.weight, linear.bias = torch.nn.Parameter(torch.ones(2, 2)), None
    _mark_slices(torch.nn.Sequential(linear, torch.nn.Linear(2, 2)))
    assert (linear.weight.tensor_model_parallel, linear.weight.partition_dim) == (True, dimension)
    # What Megatron has marked itself stays as it is, and a layer that gets its weight from elsewhere has none to mark.
    linear.weight.tensor_model_parallel = False
    _mark_slices(linear)
    assert not linear.weight.tensor_model_parallel
    linear.weight = None
    _mark_slices(linear)
