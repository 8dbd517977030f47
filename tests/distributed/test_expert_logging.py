"""What Megatron logs of experts: the aux loss of every layer at every step, wherever the layer is."""

from collections.abc import Callable, Sequence
from typing import Any

from megatron_dyn.host.seams import apply
from megatron_dyn.testing.ranks import run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from tests.distributed.matrix import MOE, TINY
from tests.distributed.plugin_run import row, train

FLAGS = {
    **TINY,
    **MOE,
    "expert_model_parallel_size": 1,
    "num_layers": 5,
    "pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_layout": "Ett|tttL",
    "global_batch_size": 2,
    "train_iters": 6,
    "lr_warmup_iters": 0,
    "moe_per_layer_logging": True,
    "dyn_exact_grad_norm": True,
}


def test_aux_losses_of_layers_that_move_are_logged_alike():
    still, moved = (
        run_ranks(train_and_listen, 2, tiny_gpt_arguments(**FLAGS, dyn_layout_at=layouts), timeout_seconds=120)[1]
        for layouts in (None, "1:Etttt|tL;2:Et|ttttL;4:Ettt|ttL")
    )
    assert len(still) == FLAGS["train_iters"]
    assert all(float.fromhex(value) > 0 for step in still for value in step["load_balancing_loss"])
    assert moved == still


def train_and_listen(argv: Sequence[str]) -> list[dict[str, Any]]:
    """Train; the aux losses by layer, in hex, each time Megatron logs them."""
    heard: list[dict[str, Any]] = []

    def listening(original: Callable[..., Any]) -> Callable[..., Any]:
        def log_per_layer(tracker: Any, *args: Any, **kwargs: Any) -> Any:
            # Called once all ranks' values are added up.
            heard.append({name: [each.hex() for each in entry.values.tolist()] for name, entry in tracker.metrics.items()})
            return original(tracker, *args, **kwargs)

        return log_per_layer

    with apply([row("megatron.core.transformer.moe.moe_logging:MoEMetricsTracker._log_per_layer", listening)]):
        train(argv)
    return heard
