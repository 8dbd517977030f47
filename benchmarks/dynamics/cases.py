"""What runs, by family: a model, the flags of the family, what its layers should cost. Pure but for kernel times."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.dynamics.expected import Curve, frozen_curve, kernel_curve, linear_curve, token_curve
from benchmarks.dynamics.kernels import NUM_TOKENS, compact_seconds, kernel_table
from megatron_dyn.dynamics.freezing.schedule import FreezeSchedule

Table = list[list[str]]
"""Rows of cells, the first one the header."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One family at work on one model."""

    name: str
    title: str
    what: str
    """What runs, for the page."""
    model: Mapping[str, Any]
    """Flags of Megatron, with underscores."""
    family: Mapping[str, Any]
    """Flags of the family."""
    num_steps: int
    every_steps: int
    """Steps between two points at which layer costs are told. The family changes the model at multiples of it only."""
    groups: Mapping[str, Sequence[int]]
    """Layers that are treated alike, by their name in the picture."""
    curves: Mapping[str, Curve]
    """What is expected, by its name in the picture."""
    table: Callable[[], Table] | None = None
    """One more table for the page, measured when the case runs."""
    layer_parameters: Sequence[int]
    end_parameters: tuple[int, int]
    """Of embedding and head."""
    remarks: Sequence[str] = field(default=())
    """What a reader should know about the figures, for the page."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_parameters)

    @property
    def tokens_per_step(self) -> int:
        """Of the global batch."""
        return int(self.model["global_batch_size"] * self.model["seq_length"])


def gpt(*, hidden_size: int, num_layers: int, num_microbatches: int, vocab_size: int) -> dict[str, Any]:
    """The flags of a GPT whose layers take some 10 ms a micro-batch of 256 tokens on one core."""
    return {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": 4,
        "seq_length": 128,
        "max_position_embeddings": 128,
        "vocab_size": vocab_size,
        "micro_batch_size": 2,
        "global_batch_size": 2 * num_microbatches,
        # With tied weights the first stage could never do without a backward: its embedding would always train.
        "untie_embeddings_and_output_weights": True,
    }


def layer_parameters(hidden_size: int, *, num_experts: int = 0) -> int:
    """Weights of one decoder layer, biases and norms left out: attention 4 h^2, feed-forward 8 h^2 each."""
    feed_forward = num_experts or 1
    return hidden_size**2 * (4 + 8 * feed_forward) + hidden_size * num_experts


_FREEZE = {"0-2": [30, -1], "9": [30, 60], "3-5": [60, -1], "6-8": [90, -1]}
_FREEZING = Case(
    name="freezing",
    title="layer freezing: three quarters of the layers freeze, front to back",
    what="12 layers. After 30 steps layers 0-2 freeze, and layer 9 in the middle; after 60 layers 3-5, and layer 9 trains "
    "again; after 90 layers 6-8.",
    model=gpt(hidden_size=128, num_layers=12, num_microbatches=8, vocab_size=512),
    family={"dyn_freeze": json.dumps(_FREEZE)},
    num_steps=120,
    every_steps=10,
    groups={"layers 0-2": range(3), "layers 3-5": range(3, 6), "layers 6-8": range(6, 9), "layer 9": [9], "10-11": [10, 11]},
    curves={
        "expected": frozen_curve(
            FreezeSchedule.of_table(_FREEZE, flag="--dyn-freeze", num_layers=12, shown="", with_embedding=True)
        )
    },
    layer_parameters=[layer_parameters(128)] * 12,
    end_parameters=(128 * (512 + 128), 128 * 512),
    remarks=(
        "Expected is what the points before step 30 say: a frozen prefix keeps its forward alone, a frozen layer behind a "
        "training one its forward and half of its backward (the input gradient; attention itself has no weights, so that "
        "it is a little more).",
    ),
)

_PRUNING = Case(
    name="pruning",
    title="gradual pruning: whole outputs, to 90 %",
    what="8 layers and a vocabulary of 4,096. Whole outputs of the linear layers (`rows`) are pruned by magnitude over the "
    "whole model, by the cubic schedule, after steps 20, 30, ... 60, to 90 %.",
    model={**gpt(hidden_size=256, num_layers=8, num_microbatches=4, vocab_size=4096), "lr": 3e-4},
    family={
        "dyn_prune": True,
        "dyn_prune_start": 20,
        "dyn_prune_end": 60,
        "dyn_prune_every": 10,
        "dyn_prune_final": 0.9,
        "dyn_prune_pattern": "rows",
        # Named, not chosen by timing: two runs that choose differently differ in their last bits.
        "dyn_prune_kernels": "compact",
    },
    num_steps=100,
    every_steps=10,
    groups={"layers 0-3": range(4), "layers 4-7": range(4, 8)},
    curves={
        "ideal": linear_curve(hidden_size=256, seq_length=128),
        "by kernel times": kernel_curve(hidden_size=256, num_tokens=NUM_TOKENS, seconds_of=compact_seconds),
    },
    table=kernel_table,
    layer_parameters=[layer_parameters(256)] * 8,
    end_parameters=(256 * (4096 + 128), 256 * 4096),
    remarks=(
        "Ideal: the linear layers cost what is left of them, the rest of a layer what it did. By kernel times: the same with "
        "the times of the kernels at that density, taken apart from any training.",
        "Pruning over the whole model takes about as much from every layer here, since all start alike. What gets out of "
        "balance is layers against head: the head is not pruned.",
    ),
)

_MOE = Case(
    name="moe",
    title="mixture of experts: routers without a balancing loss, capacity 1",
    what="4 dense layers, then 4 with 8 experts, of which a token goes to 2. No balancing loss; an expert takes its fair share "
    "of the tokens at most, so that a layer whose router prefers few experts drops tokens and has less to do.",
    model={
        **gpt(hidden_size=128, num_layers=8, num_microbatches=8, vocab_size=512),
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_layer_freq": "[0,0,0,0,1,1,1,1]",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_expert_capacity_factor": 1.0,
        "moe_token_dispatcher_type": "alltoall",
        "disable_bias_linear": True,
    },
    family={"dyn_moe": True, "dyn_moe_interval": 3},
    num_steps=80,
    every_steps=10,
    groups={"dense, 0-3": range(4), "layer 4": [4], "layer 5": [5], "layer 6": [6], "layer 7": [7]},
    curves={"by tokens": token_curve(hidden_size=128, seq_length=128, topk=2)},
    layer_parameters=[layer_parameters(128)] * 4 + [layer_parameters(128, num_experts=8)] * 4,
    end_parameters=(128 * (512 + 128), 128 * 512),
    remarks=(
        "By tokens: the experts' share of a layer follows the tokens that they take, as the router counted them.",
        "A split by parameters takes an expert layer for six dense ones, of which it has the weights; it computes "
        "less than two.",
        "With all experts on one rank and no capacity, routing moves no cost at all: every token has its two experts "
        "whichever they are. It is dropping, here, that does.",
    ),
)

CASES: Mapping[str, Case] = {case.name: case for case in (_FREEZING, _PRUNING, _MOE)}
