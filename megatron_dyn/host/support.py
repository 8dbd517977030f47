"""What the plugin can move layers under, as data: each limit names its flag. Checked at start, never found at step 500.

The support matrix (docs/support.md) is generated from this table (`tests/contract/test_docs.py`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dyn.config import ConfigError
from megatron_dyn.records import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """One combination that is refused while layers may move."""

    flag: str
    """What the user wrote on the command line."""
    what: str
    """The feature, for the support matrix."""
    used: Callable[[Any], bool]
    """Whether these (validated) Megatron arguments use it."""


def _above_one(name: str) -> Callable[[Any], bool]:
    return lambda args: (getattr(args, name, None) or 1) > 1


def _set(*names: str) -> Callable[[Any], bool]:
    return lambda args: any(getattr(args, name, None) not in (None, False, 0, "none", []) for name in names)


LIMITS: tuple[Limit, ...] = (
    Limit(
        flag="--pipeline-model-parallel-size 1",
        what="a single pipeline stage",
        used=lambda args: args.pipeline_model_parallel_size < 2,
    ),
    Limit(flag="--use-megatron-fsdp", what="Megatron FSDP", used=_set("use_megatron_fsdp", "use_custom_fsdp")),
    Limit(flag="--use-torch-fsdp2", what="torch FSDP2", used=_set("use_torch_fsdp2")),
    Limit(
        flag="--cuda-graph-impl",
        what="CUDA graphs",
        used=_set("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
    ),
    Limit(
        flag="--fp8-format",
        what="fp8 and fp4 (extra state of modules moves, but equality was not yet seen on a GPU)",
        used=_set("fp8", "fp4", "fp8_format", "fp4_format"),
    ),
    Limit(
        flag="--use-precision-aware-optimizer",
        what="moments in less than fp32 (a scale per shard does not survive another cut)",
        used=_set("use_precision_aware_optimizer"),
    ),
    Limit(
        flag="--overlap-param-gather-with-optimizer-step",
        what="an optimizer per model chunk",
        used=_set("overlap_param_gather_with_optimizer_step"),
    ),
    Limit(
        flag="--overlap-moe-expert-parallel-comm",
        what="layers that run in pieces, two micro-batches at a time",
        used=_set("overlap_moe_expert_parallel_comm"),
    ),
    Limit(
        flag="--tensor-parallel-num-weight-shards",
        what="weights in shards that are put together for each use",
        used=lambda args: _above_one("gtp_weight_remat_size")(args) or _above_one("expert_gtp_weight_remat_size")(args),
    ),
    Limit(flag="--use-nccl-ub", what="gradient buffers registered with NCCL", used=_set("nccl_ub")),
    Limit(
        flag="--optimizer",
        what="optimizers other than adam and sgd",
        used=lambda args: args.optimizer not in ("adam", "sgd"),
    ),
    Limit(flag="--optimizer-cpu-offload", what="optimizer offload", used=_set("optimizer_cpu_offload")),
    Limit(
        flag="--cpu-offloading-num-layers",
        what="activation offload",
        used=_set("cpu_offloading", "cpu_offloading_num_layers", "fine_grained_activation_offloading"),
    ),
    Limit(
        flag="--heterogeneous-layers-config-path",
        what="layers of different structure",
        used=_set("heterogeneous_layers_config_path", "heterogeneous_layers_config_encoded_json"),
    ),
    Limit(
        flag="--hybrid-layer-pattern",
        what="hybrid (Mamba) models",
        used=_set("hybrid_layer_pattern", "hybrid_override_pattern"),
    ),
    Limit(flag="--freeze-all-layers", what="frozen models", used=_set("freeze_all_layers")),
    Limit(flag="--perform-rl-step", what="reinforcement learning steps", used=_set("perform_rl_step")),
    Limit(flag="--inprocess-restart", what="in-process restart", used=_set("inprocess_restart")),
    Limit(
        flag="--non-persistent-ckpt-type",
        what="local (non-persistent) checkpoints",
        used=lambda args: getattr(args, "non_persistent_ckpt_type", None) == "local",
    ),
    Limit(
        flag="--ckpt-format",
        what="saving in formats other than torch_dist and torch",
        used=lambda args: getattr(args, "save", None) is not None and args.ckpt_format not in ("torch_dist", "torch"),
    ),
    Limit(
        flag="--rampup-batch-size",
        what="a batch size that changes (step times would not compare)",
        used=_set("rampup_batch_size", "step_batch_size_schedule"),
    ),
    Limit(
        flag="--ckpt-assume-constant-structure",
        what="checkpoints whose cached structure a move would make stale",
        used=_set("ckpt_assume_constant_structure"),
    ),
)


def check_exact_grad_norm(args: Any) -> None:
    """Raise ConfigError where gradients are no plain tensors, or lie over ranks that the norm's group does not hold."""
    for flag, name in (("--use-megatron-fsdp", "use_megatron_fsdp"), ("--use-torch-fsdp2", "use_torch_fsdp2")):
        if getattr(args, name, None):
            raise ConfigError(f"--dyn-exact-grad-norm: cannot be had with {flag}; drop one of them")


RNG_LIMITS: tuple[Limit, ...] = (
    Limit(
        flag="--cuda-graph-impl",
        what="a graph replays the streams it was captured with",
        used=_set("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"),
    ),
    Limit(flag="--te-rng-tracker", what="its states are generators that graphs share", used=_set("te_rng_tracker")),
    Limit(flag="--inference-rng-tracker", what="it holds no states", used=_set("inference_rng_tracker")),
    Limit(
        flag="--hybrid-layer-pattern",
        what="Mamba layers have no streams of their own",
        used=_set("hybrid_layer_pattern", "hybrid_override_pattern", "mtp_hybrid_override_pattern"),
    ),
    Limit(
        flag="--mtp-use-repeated-layer",
        what="one layer would draw the same at each depth",
        used=_set("mtp_use_repeated_layer"),
    ),
    Limit(
        flag="--overlap-moe-expert-parallel-comm",
        what="layers run in pieces, two micro-batches at a time",
        used=_set("overlap_moe_expert_parallel_comm"),
    ),
)
"""What `--dyn-rng-per-layer` cannot go with, whether or not layers move."""


def check_rng_per_layer(args: Any) -> None:
    """Raise ConfigError naming every flag under which layers cannot have streams of their own."""
    if used := [limit for limit in RNG_LIMITS if limit.used(args)]:
        raise ConfigError(f"--dyn-rng-per-layer: cannot be had with {_told(used)}; drop one of them")


def check_support(args: Any) -> None:
    """Raise ConfigError naming every flag that keeps layers from moving. Call it only when moves are possible."""
    if used := [limit for limit in LIMITS if limit.used(args)]:
        raise ConfigError(refusal(used))


def check_dynamic(args: Any, names: Sequence[str]) -> None:
    """Raise ConfigError naming every flag under which the plugin cannot edit model and optimizer of a job.

    `names` are those of the families that want to. A single pipeline stage is no hindrance.
    """
    used = [limit for limit in LIMITS if limit.used(args) and not limit.flag.startswith("--pipeline-model-parallel-size")]
    if used:
        flags = "/".join(f"--dyn-{name}" for name in names)
        raise ConfigError(f"{flags}: the model cannot change while it trains with {_told(used)}; drop it or the --dyn flags")


def check_measurable(layout: Layout) -> None:
    """Raise ConfigError for a layout whose costs cannot be told apart. Call it only when layers move by measurement."""
    for index, chunk in enumerate(layout.chunks):
        if chunk.num_mtp and not chunk.loss:
            # Their time would count as every stage's, and their bytes as nobody's.
            raise ConfigError(
                f"--dyn-rebalance: expected MTP layers (m) on the chunk of the loss (L), got chunk {index} of {layout.text!r}: "
                "there they are not measured; force layouts with --dyn-layout-at instead"
            )


def refusal(limits: Sequence[Limit]) -> str:
    """The line for a command line that runs into these limits."""
    return f"--dyn-rebalance/--dyn-layout-at: cannot move layers with {_told(limits)}; drop it or the --dyn flags"


def _told(limits: Sequence[Limit]) -> str:
    return "; ".join(f"{limit.flag} ({limit.what})" for limit in limits)


def randomness_notice(args: Any) -> str | None:
    """One line when moves will not be exact because of dropout; None when they will. Ask it without --dyn-rng-per-layer."""
    rates = {"--hidden-dropout": args.hidden_dropout, "--attention-dropout": args.attention_dropout}
    used = ", ".join(f"{flag} {rate:g}" for flag, rate in rates.items() if rate)
    if not used:
        return None
    return (
        f"{used}: a moved layer draws from another rank's dropout stream; the run stays valid but not bit-equal; "
        "--dyn-rng-per-layer makes it so"
    )
