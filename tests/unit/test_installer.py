"""What `install` puts in force for a flag, and what it says; the parts themselves are tested where they are."""

from types import SimpleNamespace

import pytest
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_dyn import installer
from megatron_dyn.config import ConfigError, DynConfig, ForcedLayout
from megatron_dyn.host.seams import is_applied

MOVES = {"layout_at": (ForcedLayout(iteration=1, text="Et|tttL"),), "exact_grad_norm": False}


@pytest.fixture
def args(monkeypatch):
    """A job with dropout whose layers can move; the training loop is not hooked into."""
    monkeypatch.setattr(installer._Workshop, "driver", lambda _self, _layout: SimpleNamespace(rows=list))
    return SimpleNamespace(
        pipeline_model_parallel_size=2,
        pipeline_model_parallel_layout="Et|tttL",
        num_layers=4,
        load=None,
        optimizer="adam",
        ckpt_format="torch_dist",
        hidden_dropout=0.1,
        attention_dropout=0.0,
    )


def test_streams_per_layer_are_in_force_with_their_flag_until_they_are_undone(args):
    plain = schedules.forward_step, TransformerLayer.__call__
    installation = installer.install(args, DynConfig(rng_per_layer=True))
    assert [seam.target.rpartition(":")[2] for seam in installation.seams] == ["forward_step", "TransformerLayer.__call__"]
    assert all(is_applied(seam) for seam in installation.seams)
    installation.undo()
    assert (schedules.forward_step, TransformerLayer.__call__) == plain
    assert installer.install(args, DynConfig()).seams == ()


def test_dropout_is_warned_of_where_it_makes_moves_inexact_only(args, caplog):
    installer.install(args, DynConfig(**MOVES)).undo()
    assert "--hidden-dropout 0.1" in caplog.text
    assert "--dyn-rng-per-layer" in caplog.text
    caplog.clear()
    installer.install(args, DynConfig(rng_per_layer=True, **MOVES)).undo()
    installer.install(args, DynConfig()).undo()
    assert caplog.text == ""


def test_what_streams_per_layer_cannot_go_with_is_refused_without_moves_as_well(args):
    args.te_rng_tracker = True
    with pytest.raises(ConfigError, match="--te-rng-tracker"):
        installer.install(args, DynConfig(rng_per_layer=True))
