"""The support matrix as data: each case is one combination under which a run with random moves equals the run without.

Used by test_matrix.py, which runs them, and by docs/generate.py, which prints them as docs/support.md. Models are as small as
Megatron lets them be; what matters is which of its code paths a move has to get through.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

NUM_STEPS = 40
NUM_MOVES = 6

TINY = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "micro_batch_size": 1,
    "train_iters": NUM_STEPS,
    "lr_warmup_iters": 5,
    "lr_decay_style": "cosine",
    "clip_grad": 0.3,
    "log_interval": 10,
}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How the ranks are laid out."""

    counts: tuple[int, ...]
    """Decoder layers by model chunk, as the run starts."""
    num_stages: int = 2
    data: int = 1
    tensor: int = 1
    context: int = 1

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_stages * self.data * self.tensor * self.context

    @property
    def text(self) -> str:
        """For people: `PP2 x VPP2 x DP2`."""
        virtual = len(self.counts) // self.num_stages
        sizes = (("TP", self.tensor), ("CP", self.context), ("PP", self.num_stages), ("VPP", virtual), ("DP", self.data))
        return " x ".join(f"{name}{size}" for name, size in sizes if size > 1 or name == "DP")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the matrix."""

    name: str
    """The test's id."""
    what: str
    """For people: what is special here."""
    topology: Topology
    flags: Mapping[str, Any] = field(default_factory=dict)
    """Megatron's, the same with and without moves."""
    moving: Mapping[str, Any] = field(default_factory=dict)
    """The plugin's, besides the moves."""
    like: Mapping[str, Any] = field(default_factory=dict)
    """Flags that the run without moves has instead: it may then be shared, and two things are shown at once."""
    core: bool = False
    """Whether it also runs on every other supported release (make test-compat)."""
    mtp: bool = False
    lowest: int = 1
    """Fewest layers that a random move may leave on a stage."""

    def still_flags(self) -> dict[str, Any]:
        """Flags of the run without moves."""
        topology = self.topology
        return {
            **TINY,
            "num_layers": sum(topology.counts),
            "pipeline_model_parallel_size": topology.num_stages,
            "pipeline_model_parallel_layout": self.layout(topology.counts),
            "tensor_model_parallel_size": topology.tensor,
            "context_parallel_size": topology.context,
            "global_batch_size": self.num_microbatches * topology.data,
            **self.flags,
            **self.like,
        }

    def moved_flags(self) -> dict[str, Any]:
        """Flags of the run with moves."""
        kept = {name: value for name, value in self.still_flags().items() if name not in self.like}
        return {**kept, **self.flags, **self.moving, "dyn_layout_at": self.moves()}

    @property
    def num_microbatches(self) -> int:
        """Per replica and step: several where the schedule needs them, and where there is nothing but stages."""
        topology = self.topology
        return 1 if topology.world_size > topology.num_stages == len(topology.counts) else 2

    def layout(self, counts: tuple[int, ...]) -> str:
        """Megatron's text for decoder counts per chunk."""
        return "E" + "|".join("t" * count for count in counts) + ("m" if self.mtp else "") + "L"

    def moves(self) -> str:
        """Random layouts at random steps, each different from the one before; the same every time."""
        draw = random.Random(self.name)
        counts, total = self.topology.counts, sum(self.topology.counts)
        items = []
        for step in sorted(draw.sample(range(NUM_STEPS), NUM_MOVES)):
            before = counts
            while counts == before:
                counts = tuple(self.lowest + extra for extra in _spread(draw, total - self.lowest * len(counts), len(counts)))
            items.append(f"{step}:{self.layout(counts)}")
        return ";".join(items)


def _spread(draw: random.Random, total: int, parts: int) -> list[int]:
    borders = sorted(draw.randint(0, total) for _ in range(parts - 1))
    return [end - start for start, end in zip([0, *borders], [*borders, total], strict=True)]


PP2, PP4, VPP2 = (2, 3), (1, 2, 2, 1), (2, 2, 1, 1)
BF16 = {"bf16": True}
SHARDED = {"use_distributed_optimizer": True}
OVERLAP = {**SHARDED, "overlap_grad_reduce": True, "overlap_param_gather": True}
MOE = {
    "num_experts": 4,
    "expert_model_parallel_size": 2,
    "disable_bias_linear": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-2,
}


def _core() -> Iterator[Case]:
    """{fp32, bf16} x {distributed optimizer off, on} x {PP2, PP4, PP2 x VPP2} x {DP1, DP2}."""
    for shape, counts, num_stages in (("pp2", PP2, 2), ("pp4", PP4, 4), ("pp2vpp2", VPP2, 2)):
        for data in (1, 2):
            for precision in ("fp32", "bf16"):
                for sharded in (False, True):
                    optimizer = "distributed optimizer" if sharded else "plain optimizer"
                    yield Case(
                        name=f"{shape}-dp{data}-{precision}-{'sharded' if sharded else 'plain'}",
                        what=f"{precision}, {optimizer}",
                        topology=Topology(counts=counts, num_stages=num_stages, data=data),
                        flags={"bf16": precision == "bf16", "use_distributed_optimizer": sharded},
                        # The reference is the plain optimizer's: sharding must not change a bit either.
                        like={"use_distributed_optimizer": False},
                        # A bucket smaller than most tensors: pieces of tensors travel in many rounds.
                        moving={"dyn_migrate_bucket_bytes": 1000} if sharded else {},
                        core=num_stages == 2 and shape == "pp2",
                    )


GRID: tuple[Case, ...] = tuple(_core())

CASES: tuple[Case, ...] = (
    *GRID,
    Case(
        name="untied-first-last",
        what="untied embeddings; layer counts by --decoder-first-pipeline-num-layers",
        topology=Topology(counts=(3, 2)),
        flags={
            "untie_embeddings_and_output_weights": True,
            "decoder_first_pipeline_num_layers": 3,
            "pipeline_model_parallel_layout": None,
        },
    ),
    Case(
        name="account-for-ends",
        what="layer counts by --account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split",
        topology=Topology(counts=(1, 2, 2, 1), num_stages=4),
        flags={
            "account_for_embedding_in_pipeline_split": True,
            "account_for_loss_in_pipeline_split": True,
            "pipeline_model_parallel_layout": None,
            **SHARDED,
        },
    ),
    Case(
        name="empty-stages",
        what="stages that lose all their layers and get some again",
        topology=Topology(counts=PP4, num_stages=4),
        flags={**BF16, **SHARDED},
        moving={"dyn_allow_empty_stages": True},
        lowest=0,
    ),
    Case(
        name="mtp",
        what="multi-token prediction, pinned to its stage",
        topology=Topology(counts=PP2),
        flags={"mtp_num_layers": 1, "position_embedding_type": "rope", **BF16, **SHARDED},
        mtp=True,
    ),
    Case(
        name="fp16",
        what="fp16 with dynamic loss scaling, skipped steps included",
        topology=Topology(counts=PP2),
        # A scale that overflows at first: the scaler has to back off, and its counters have to stay what they were.
        flags={"fp16": True, "initial_loss_scale": 2.0**24, "loss_scale_window": 7, "hysteresis": 1},
    ),
    Case(
        name="tp2",
        what="tensor parallelism",
        topology=Topology(counts=PP2, tensor=2),
        flags={**BF16, **SHARDED},
    ),
    Case(
        name="tp2-sequence-parallel",
        what="tensor and sequence parallelism, RMSNorm, SwiGLU, rotary embeddings",
        topology=Topology(counts=PP2, tensor=2),
        flags={
            "sequence_parallel": True,
            "normalization": "RMSNorm",
            "swiglu": True,
            "ffn_hidden_size": 32,
            "position_embedding_type": "rope",
            "group_query_attention": True,
            "num_query_groups": 2,
            "num_attention_heads": 4,
        },
    ),
    Case(
        name="cp2",
        what="context parallelism, rotary embeddings, overlapped communication: the optimizer's shards go over CP as well",
        topology=Topology(counts=PP2, context=2),
        flags={
            # A tuple: the flags of a run without moves are the key that it is shared by.
            "spec": ("tests.distributed.context_parallel_spec", "context_parallel_layer"),
            "position_embedding_type": "rope",
            **BF16,
            **OVERLAP,
        },
    ),
    Case(
        name="moe-alltoall",
        what="experts: EP2, all-to-all dispatcher, expert bias, sigmoid router, distributed optimizer",
        topology=Topology(counts=PP2, data=2),
        flags={
            **MOE,
            **BF16,
            **SHARDED,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
        },
    ),
    Case(
        name="moe-overlap",
        what="experts with overlapped gradient reduction and parameter gather",
        topology=Topology(counts=PP2),
        flags={**MOE, **OVERLAP, "expert_model_parallel_size": 1},
    ),
    Case(
        name="moe-allgather-mixed",
        what="experts: EP2, all-gather dispatcher, dense and expert layers mixed, aux loss logged per layer",
        topology=Topology(counts=PP2, data=2),
        flags={
            **MOE,
            "moe_token_dispatcher_type": "allgather",
            "moe_layer_freq": "[0,1,0,1,1]",
            "moe_per_layer_logging": True,
        },
    ),
    Case(
        name="moe-expert-tensor-parallel",
        what="experts: expert-TP2 with TP2 and sequence parallelism, distributed optimizer",
        topology=Topology(counts=PP2, tensor=2),
        flags={
            **MOE,
            **SHARDED,
            "expert_model_parallel_size": 1,
            "expert_tensor_parallel_size": 2,
            "sequence_parallel": True,
        },
    ),
    Case(
        name="overlap",
        what="overlapped gradient reduction and parameter gather",
        topology=Topology(counts=PP2, data=2),
        flags={**BF16, **OVERLAP},
    ),
    Case(
        name="overlap-virtual",
        what="overlapped gradient reduction and parameter gather with virtual stages",
        topology=Topology(counts=VPP2, data=2),
        flags=OVERLAP,
    ),
    Case(
        name="optimizer-instances",
        what="distributed optimizer in two instances, each sharded over half of the replicas",
        topology=Topology(counts=PP2, data=4),
        flags={**SHARDED, "num_distributed_optimizer_instances": 2},
    ),
    Case(
        name="recompute-full-sgd",
        what="full recomputation; SGD with momentum; Megatron's gloo copy service as transport",
        topology=Topology(counts=PP2),
        flags={
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "optimizer": "sgd",
            "empty_unused_memory_level": 2,
        },
        moving={"dyn_transport": "gloo-copy"},
    ),
    Case(
        name="recompute-selective-dropout",
        what="selective recomputation, dropout with --dyn-rng-per-layer",
        topology=Topology(counts=PP2),
        flags={
            "recompute_granularity": "selective",
            "hidden_dropout": 0.1,
            "attention_dropout": 0.1,
            "dyn_rng_per_layer": True,
            **BF16,
            **SHARDED,
        },
    ),
)
