"""The family: gives layers their routers, counts their loads, moves biases, and says what it saw."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches

from megatron_dyn.dynamics.moe.limits import check_moe
from megatron_dyn.dynamics.moe.loads import Loads, max_over_mean
from megatron_dyn.dynamics.moe.meter import LoadMeter
from megatron_dyn.dynamics.moe.routers import LossFreeRouter
from megatron_dyn.dynamics.moe.settings import MoeSettings, Routing, settings_from_args
from megatron_dyn.dynamics.moe.specs import has_experts, let_counts_vary, router_of, with_router
from megatron_dyn.ports import Change, Dynamic, Job, JobError


def from_args(args: Any) -> Dynamic:
    """The family that the arguments switch on. Raises ConfigError naming the flag."""
    return MixtureOfExperts(settings_from_args(args))


class MixtureOfExperts(Dynamic):
    """See ports.Dynamic. Routing changes nothing that the planner does not measure: it announces no change of costs."""

    name = "moe"

    def __init__(self, settings: MoeSettings) -> None:
        self._settings = settings
        self._router = router_of(settings)
        self._job: Job | None = None
        self._told_at = 0
        self._loads: dict[int, Loads] = {}
        self._loads_of: tuple[int, int] = (0, 0)

    def check(self, args: Any, others: Sequence[str]) -> None:
        """See ports.Dynamic."""
        check_moe(self._settings, args)

    def layer_spec(self, layer: int, spec: Any) -> Any:
        """See ports.Dynamic."""
        return spec if self._router is None else with_router(spec, self._router)

    def attach(self, layer: int, module: torch.nn.Module) -> None:
        """See ports.Dynamic."""
        if not has_experts(module):
            return
        if self._settings.routing is Routing.EXPERT_CHOICE:
            let_counts_vary(module.mlp)
        if self._settings.record:
            config = module.mlp.config
            meter = LoadMeter(
                num_experts=config.num_moe_experts,
                topk=config.moe_router_topk,
                padded=config.moe_pad_expert_input_to_capacity,
                num_microbatches=self._settings.interval_steps * get_num_microbatches(),
            )
            meter.watch(module.mlp)

    def begin(self, job: Job, step: int, state: Any) -> None:
        """See ports.Dynamic."""
        self._job = job
        has_bias = state is not None and state["routing"] == Routing.LOSS_FREE.value
        for router in self._routers():
            router.saved = has_bias

    def start(self, step: int) -> None:
        """See ports.Dynamic. Raises JobError where no layer has experts."""
        self._told_at = step
        for router in self._routers():
            router.saved = True
        here = [layer for layer, module in self._layers().items() if has_experts(module)]
        if not any(self._job.gather(here, "layers with experts")):
            raise JobError("--dyn-moe: expected decoder layers with experts, found none; is --spec given?")

    def before_step(self, step: int) -> None:
        """See ports.Dynamic."""
        for meter in self._meters().values():
            meter.seek((step - 1 - self._told_at) * get_num_microbatches())

    def at_boundary(self, step: int) -> Sequence[Change]:
        """See ports.Dynamic."""
        self._move_biases()
        settings = self._settings
        if not settings.record or (step % settings.interval_steps and step != self._job.args.train_iters):
            return ()
        return self._tell(step)

    def state(self) -> Any:
        """See ports.Dynamic."""
        return {"routing": self._settings.routing.value}

    def notes(self, layer: int) -> Mapping[str, Any]:
        """See ports.Dynamic."""
        loads = self._loads.get(layer)
        if loads is None:
            return {}
        iteration, steps = self._loads_of
        return {"iteration": iteration, "steps": steps, **loads.facts()}

    def _layers(self) -> Mapping[int, torch.nn.Module]:
        return {} if self._job is None else self._job.layers

    def _routers(self) -> list[LossFreeRouter]:
        """The local routers with a bias, in the order of their layers."""
        if self._settings.routing is not Routing.LOSS_FREE:
            return []
        return [module.mlp.router for _, module in sorted(self._layers().items()) if has_experts(module)]

    def _meters(self) -> dict[int, LoadMeter]:
        """Those of the local layers, in order."""
        if not self._settings.record:
            return {}
        return {layer: module.mlp.dyn_loads for layer, module in sorted(self._layers().items()) if has_experts(module)}

    def _move_biases(self) -> None:
        """Add up the tokens of the step over all ranks that have the same layers, and let the biases follow."""
        if not (routers := self._routers()):
            return
        tokens = torch.stack([router.step_tokens for router in routers])
        # Integers, over the ranks of one stage: neither the layout nor the order of the sum can show in them.
        dist.all_reduce(tokens, group=routers[0].tp_dp_cp_group)
        for router, counted in zip(routers, tokens, strict=True):
            router.step_tokens.zero_()
            # A frozen layer computes the same at every step, or nothing that was kept of it would hold.
            if router.weight.requires_grad:
                router.update_bias(counted)

    def _tell(self, step: int) -> Sequence[Change]:
        """Add up what was counted since the last line, over all ranks; one line on it."""
        steps, self._told_at = step - self._told_at, step
        table = self._job.sum_counts(self._counted(), "loads of experts")
        num_experts = self._job.args.num_experts
        self._loads_of = (step, steps)
        self._loads = {
            layer: Loads(
                layer=layer,
                tokens_per_expert=tuple(row[:num_experts]),
                expected_pairs=row[num_experts],
                unrouted_tokens=row[num_experts + 1],
                rank_tokens=tuple(row[num_experts + 2 : -1]),
                slowest_rank_tokens=row[-1],
            )
            for layer, row in enumerate(table.tolist())
            if row[num_experts]
        }
        if not self._loads:
            return ()
        worst = max(self._loads.values(), key=lambda loads: (max_over_mean(loads.tokens_per_expert), -loads.layer))
        what = (
            f"experts of {len(self._loads)} layers over {steps} steps: most uneven in layer {worst.layer}, "
            f"the busiest with {max_over_mean(worst.tokens_per_expert):.2f} times the mean"
        )
        details = {
            "routing": self._settings.routing.value,
            "steps": steps,
            "layers": [{"layer": layer, **loads.facts()} for layer, loads in self._loads.items()],
        }
        return (Change(family=self.name, iteration=step, what=what, details=details, changes_costs=False),)

    def _counted(self) -> torch.Tensor:
        """This rank's share of the table [layers, experts + 2 + expert-parallel ranks + 1]: see `_tell` for its columns."""
        args = self._job.args
        num_ranks = args.expert_model_parallel_size
        table = torch.zeros(args.num_layers, args.num_experts + 2 + num_ranks + 1, dtype=torch.int64)
        meters = self._meters()
        if not meters:
            return table
        layers = list(meters)
        table[layers, : args.num_experts + 2] = torch.stack([meter.counts for meter in meters.values()]).cpu()
        # Ranks of one expert-tensor-parallel group compute the same rows, each with its slice of the weights.
        if parallel_state.get_expert_tensor_parallel_rank() == 0:
            rows = torch.stack([meter.rows for meter in meters.values()])
            expert_rank = parallel_state.get_expert_model_parallel_rank()
            table[layers, args.num_experts + 2 + expert_rank] = rows.sum(dim=1).cpu()
            # The ranks of the group hold the same layers and ran the same micro-batches, each with experts of its own.
            dist.all_reduce(rows, op=dist.ReduceOp.MAX, group=parallel_state.get_expert_model_parallel_group())
            if expert_rank == 0:
                table[layers, -1] = rows.sum(dim=1).cpu()
        for meter in meters.values():
            meter.clear()
        return table
