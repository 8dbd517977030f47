"""A layer specification for `--spec MODULE NAME`, whose attention works on the CPU when the sequence is split over ranks.

Megatron's own attention for context parallelism needs Transformer Engine. Only what attends is replaced: everything
else of the layer is Megatron's local one.
"""

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn.functional import scaled_dot_product_attention


class GatheringAttention(torch.nn.Module):
    """Causal attention of this rank's queries to the keys and values of all ranks of the context-parallel group."""

    def __init__(
        self,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection,
        softmax_scale: float | None = None,
        **_unused: object,
    ) -> None:
        super().__init__()
        # No mask would be dropped: a run with it would pass for one with dropout.
        assert config.attention_dropout == 0, f"needs --attention-dropout 0, not {config.attention_dropout}"
        self.group: ProcessGroup = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_mask: object, **_unused: object) -> Tensor:
        """Return what this rank's tokens gather, [local sequence, batch, heads * head size]; all ranks of the group call it.

        `query`, `key` and `value` are [local sequence, batch, heads, head size].
        """
        # Megatron's gather along the first dimension, whose backward sums each rank's part of the gradient over the group.
        key, value = (gather_from_sequence_parallel_region(part.contiguous(), group=self.group) for part in (key, value))
        here, everywhere = self._positions(query.size(0))
        context = scaled_dot_product_attention(
            *(part.permute(1, 2, 0, 3).float() for part in (query, key, value)),
            attn_mask=everywhere <= here.unsqueeze(1),
            scale=self.softmax_scale,
        )
        return context.to(query.dtype).permute(2, 0, 1, 3).flatten(2)

    def _positions(self, num_local: int) -> tuple[Tensor, Tensor]:
        """Return the positions in the sequence of this rank's tokens, and of the gathered ones.

        Megatron cuts the sequence into twice as many pieces as there are ranks, and gives each an early and a late one.
        """
        size = self.group.size()
        pieces = torch.arange(num_local * size).chunk(2 * size)
        by_rank = [torch.cat((pieces[rank], pieces[-1 - rank])) for rank in range(size)]
        return by_rank[self.group.rank()], torch.cat(by_rank)


context_parallel_layer = get_gpt_layer_local_spec()
context_parallel_layer.submodules.self_attention.submodules.core_attention = GatheringAttention
