"""The GPT task as Megatron's `pretrain()` wants it: forward step, loss, and which ranks hold an embedding.

The wheel of Megatron-core ships none of them. Handed to Megatron by `host.pretrain`; data comes from `host.gpt_data`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
from megatron.core.utils import StragglerDetector, get_attr_wrapped_model
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args

from megatron_dyn.host.gpt_data import get_batch

SPIKE_FACTOR = 10
"""With --check-for-spiky-loss, a loss this many times the largest seen is reported."""

_stragglers = StragglerDetector()


def forward_step(iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, Any]:
    """Run the forward pass of one micro-batch on one model chunk; Megatron's schedules call it.

    Returns the output (or, where the schedule overlaps expert communication, the schedule plan) and the loss function.
    """
    timers = get_timers()
    config = get_attr_wrapped_model(model, "config")
    timers("batch-generator", log_level=2).start()
    with _stragglers(bdata=True):
        batch = get_batch(iterator, config, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    with _stragglers:
        run = model.build_schedule_plan if return_schedule_plan else model
        output = run(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
        )
    return output, partial(loss_function, batch["loss_mask"])


def loss_function(loss_mask: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return (summed loss, number of tokens, report) of one micro-batch, as Megatron's schedules expect it.

    `output` holds a loss per token, [micro_batch, sequence]; `loss_mask` is 1.0 where a token counts. The report
    carries the same two numbers for logging; Megatron sums them over micro-batches and data-parallel ranks and divides.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    _validate(loss)
    return loss, num_tokens, {"lm loss": torch.cat([loss.detach().reshape(1), num_tokens.reshape(1)])}


def embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return which global ranks of a pipeline hold a word embedding.

    They are the first, the last where weights are tied, and those with layers of multi-token prediction.
    """
    args = get_args()
    ranks = {pp_ranks[0]}
    if len(pp_ranks) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pp_ranks[-1])
        ranks.update(get_mtp_ranks(pp_ranks, core_transformer_config_from_args(args)))
    return sorted(ranks)


def _validate(loss: torch.Tensor) -> None:
    """Let Megatron's rerun state machine judge the loss of this rank before it is reduced over data-parallel ranks."""
    args, machine = get_args(), get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for name, is_bad in (("NaN", torch.isnan), ("Inf", torch.isinf)):
            message = f"found {name} in local forward loss calculation"
            machine.validate_result(result=loss, rejection_func=is_bad, message=message, tolerance=0.0, fatal=True)
    if args.check_for_spiky_loss:
        is_spike = partial(machine.is_unexpectedly_large, threshold=SPIKE_FACTOR, context="loss")
        machine.validate_result(result=loss, rejection_func=is_spike, message="Spiky loss", tolerance=0.0, fatal=False)
