"""The layout record and Megatron's own: the same layers on the same stage, in both directions."""

from types import SimpleNamespace

import pytest
from megatron.core import parallel_state
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_dyn.host.layout import check_built, layer_offset, layout_of_args, publish
from megatron_dyn.ports import JobError
from megatron_dyn.records import Layout, LayoutError

TEXTS = [("Et*4|t*4L", 2), ("Ett|tttt|ttL", 3), ("E|t*3|t*4|tL", 4), ("Et|(tt|)*2tL", 4), ("Et|tt|t|tL", 2)]


def args_of(num_stages=2, num_layers=8, **changes):
    """Megatron's (validated) arguments, as far as they say which layout it will build."""
    defaults = {
        "pipeline_model_parallel_size": num_stages,
        "num_layers": num_layers,
        "pipeline_model_parallel_layout": None,
        "virtual_pipeline_model_parallel_size": None,
        "decoder_first_pipeline_num_layers": None,
        "decoder_last_pipeline_num_layers": None,
        "mtp_num_layers": None,
    }
    return SimpleNamespace(**(defaults | changes))


@pytest.fixture
def pp_rank():
    """Sets the pipeline rank that Megatron believes to have."""
    yield parallel_state.set_pipeline_model_parallel_rank
    parallel_state.set_pipeline_model_parallel_rank(None)
    parallel_state.set_virtual_pipeline_model_parallel_world_size(None)


class TestLayoutOfArgs:
    @pytest.mark.parametrize(
        ("changes", "expected"),
        [
            ({}, "Et*4|t*4L"),
            ({"num_stages": 4}, "Et*2|t*2|t*2|t*2L"),
            ({"decoder_first_pipeline_num_layers": 3}, "Et*3|t*5L"),
            ({"num_stages": 3, "decoder_last_pipeline_num_layers": 2}, "Et*3|t*3|t*2L"),
            ({"num_stages": 3, "decoder_first_pipeline_num_layers": 1}, None),
            ({"pipeline_model_parallel_layout": "Et*7|tL"}, "Et*7|tL"),
            ({"pipeline_model_parallel_layout": PipelineParallelLayerLayout("Et*7|tL", 2)}, "Et*7|tL"),
            ({"num_layers": 7, "account_for_embedding_in_pipeline_split": True}, "Et*3|t*4L"),
            (
                {
                    "num_layers": 6,
                    "account_for_embedding_in_pipeline_split": True,
                    "account_for_loss_in_pipeline_split": True,
                },
                "Et*3|t*3L",
            ),
            ({"virtual_pipeline_model_parallel_size": 2}, "Et*2|t*2|t*2|t*2L"),
            ({"mtp_num_layers": 1}, "Et*4|t*4mL"),
        ],
    )
    def test_it_is_what_megatron_will_build(self, changes, expected):
        if expected is None:
            with pytest.raises(LayoutError, match="8 layers on 3 stages"):
                layout_of_args(args_of(**changes))
        else:
            layout = layout_of_args(args_of(**changes))
            assert (layout.text, layout.num_stages) == (expected, changes.get("num_stages", 2))

    def test_a_layout_of_another_model_is_refused_with_both_numbers(self):
        with pytest.raises(LayoutError, match="places 4 layers, the model has 8"):
            layout_of_args(args_of(pipeline_model_parallel_layout="Ett|ttL"))


class TestPublish:
    def config(self):
        return SimpleNamespace(
            num_layers=8, mtp_num_layers=None, pipeline_model_parallel_size=2, pipeline_model_parallel_layout=None
        )

    @pytest.mark.parametrize(("text", "num_stages"), TEXTS)
    def test_megatron_then_builds_the_same_layers_on_every_stage(self, text, num_stages, pp_rank):
        config, args = self.config(), args_of(num_stages)
        layout = Layout.parse(text, num_stages)
        config.num_layers = layout.num_layers
        publish(config, args, layout)
        host = config.pipeline_model_parallel_layout
        if layout.num_virtual > 1:
            parallel_state.set_virtual_pipeline_model_parallel_world_size(layout.num_virtual)
        for rank in range(num_stages):
            pp_rank(rank)
            built = [
                layer
                for vp_stage in range(layout.num_virtual)
                for layer in host.get_layer_id_list(LayerType.decoder, vp_stage=vp_stage, pp_rank=rank)
            ]
            assert tuple(built) == layout.layers_of_stage(rank)

    def test_a_resumed_or_saved_job_finds_the_same_layout_in_the_arguments(self):
        config, args = self.config(), args_of()
        layout = Layout.contiguous([5, 3])
        publish(config, args, layout)
        assert layout_of_args(args) == layout

    def test_offsets_follow(self, pp_rank):
        config, args = self.config(), args_of()
        pp_rank(1)
        for counts in ([4, 4], [7, 1]):
            publish(config, args, Layout.contiguous(counts))
            assert layer_offset(config) == counts[0]

    def test_a_layout_that_megatron_refuses_changes_nothing(self):
        config, args = self.config(), args_of()
        with pytest.raises(AssertionError, match="num_layers 8"):
            publish(config, args, Layout.contiguous([5, 4]))
        assert config.pipeline_model_parallel_layout is None
        assert args.pipeline_model_parallel_layout is None


class TestCheckBuilt:
    def test_a_stage_as_the_layout_has_it_passes(self, pp_rank):
        pp_rank(1)
        check_built(Layout.contiguous([5, 3]), (5, 6, 7))

    def test_another_stage_is_refused_with_what_was_expected_and_what_is_there(self, pp_rank):
        pp_rank(1)
        with pytest.raises(JobError, match=r"stage 1: .* expects layers \[5, 6, 7\], Megatron built \[4, 5, 6, 7\]"):
            check_built(Layout.contiguous([5, 3]), (4, 5, 6, 7))
