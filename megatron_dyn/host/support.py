"""What the plugin can move layers under, as data: each limit names its flag. Checked at start, never found at step 500.

The support matrix in the README is generated from this table (`tests/contract/test_docs.py`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_dyn.config import ConfigError


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
    Limit(flag="--use-distributed-optimizer", what="distributed optimizer", used=_set("use_distributed_optimizer")),
    Limit(
        flag="--num-layers-per-virtual-pipeline-stage",
        what="virtual pipeline stages (interleaved schedule)",
        used=_above_one("virtual_pipeline_model_parallel_size"),
    ),
    Limit(
        flag="--tensor-model-parallel-size",
        what="tensor and sequence parallelism",
        used=_above_one("tensor_model_parallel_size"),
    ),
    Limit(flag="--context-parallel-size", what="context parallelism", used=_above_one("context_parallel_size")),
    Limit(flag="--num-experts", what="mixture of experts, expert parallelism", used=_set("num_experts")),
    Limit(flag="--use-megatron-fsdp", what="Megatron FSDP", used=_set("use_megatron_fsdp", "use_custom_fsdp")),
    Limit(flag="--use-torch-fsdp2", what="torch FSDP2", used=_set("use_torch_fsdp2")),
    Limit(
        flag="--cuda-graph-impl",
        what="CUDA graphs",
        used=_set("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph"),
    ),
    Limit(flag="--mtp-num-layers", what="multi-token prediction", used=_set("mtp_num_layers")),
    Limit(flag="--overlap-grad-reduce", what="overlapped gradient reduction", used=_set("overlap_grad_reduce")),
    Limit(flag="--overlap-param-gather", what="overlapped parameter gather", used=_set("overlap_param_gather")),
    Limit(flag="--fp16", what="fp16 with loss scaling", used=_set("fp16")),
    Limit(flag="--fp8-format", what="fp8 and fp4", used=_set("fp8", "fp4")),
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
        flag="--account-for-embedding-in-pipeline-split",
        what="layer counts by embedding/loss accounting (give --pipeline-model-parallel-layout instead)",
        used=_set("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    ),
    Limit(
        flag="--decoder-first-pipeline-num-layers",
        what="layer counts by first/last stage (give --pipeline-model-parallel-layout instead)",
        used=_set("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
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
        what="saving in formats other than torch_dist (they cannot be resumed at another layout)",
        used=lambda args: getattr(args, "save", None) is not None and args.ckpt_format != "torch_dist",
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
    """Raise ConfigError where gradients are no plain tensors, so that sums per parameter would be sums per shard of one."""
    for flag, name in (("--use-megatron-fsdp", "use_megatron_fsdp"), ("--use-torch-fsdp2", "use_torch_fsdp2")):
        if getattr(args, name, None):
            raise ConfigError(f"--dyn-exact-grad-norm: cannot be had with {flag}; drop one of them")


def check_support(args: Any) -> None:
    """Raise ConfigError naming every flag that keeps layers from moving. Call it only when moves are possible."""
    used = [limit for limit in LIMITS if limit.used(args)]
    if used:
        told = "; ".join(f"{limit.flag} ({limit.what})" for limit in used)
        raise ConfigError(f"--dyn-rebalance/--dyn-layout-at: cannot move layers with {told}; drop it or the --dyn flags")


def randomness_notice(args: Any) -> str | None:
    """One line when moves will not be exact because of dropout; None when they will."""
    rates = {"--hidden-dropout": args.hidden_dropout, "--attention-dropout": args.attention_dropout}
    used = ", ".join(f"{flag} {rate:g}" for flag, rate in rates.items() if rate)
    if not used:
        return None
    return f"{used}: a moved layer draws from another rank's dropout stream; the run stays valid but not bit-equal"
