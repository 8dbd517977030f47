"""Runs of the real entry with the plugin on real ranks, and what they leave behind, bit for bit.

Collaborators: megatron_dyn.testing (ranks, tiny model). The state dump reads Megatron's own objects and none of ours, so that
a mistake in our export cannot hide itself.
"""

import hashlib
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dyn.host.seams import Seam, apply
from megatron_dyn.testing.ranks import RankResult, run_ranks
from megatron_dyn.testing.training import tiny_gpt_arguments
from megatron_dyn.testing.training import train_with_plugin as train

REPORT_FLAGS = {"dyn_record_losses": True, "dyn_exact_grad_norm": True}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run gave."""

    losses: list[dict[str, Any]]
    rounds: list[dict[str, Any]]
    state: dict[str, dict[str, Any]]
    """By global parameter name: digests of parameter, main parameter and moments, learning rate, weight decay, step."""
    consumed_samples: int
    num_groups: list[list[int]]
    """By rank: live process groups after each step."""

    def numbers(self) -> list[tuple[Any, ...]]:
        """What must be equal with and without moves."""
        return [(line["iteration"], line["losses"], line["grad_norm"]) for line in self.losses]


def run(world_size: int, *, timeout_seconds: float = 150.0, extra: Sequence[str] = (), **flags: Any) -> Run:
    """Train the tiny GPT with the plugin's entry; keywords are flags. Raises RankFailure when a rank fails."""
    with tempfile.TemporaryDirectory() as folder:
        argv = [*tiny_gpt_arguments(**{"dyn_report_dir": folder, **REPORT_FLAGS, **flags}), *extra]
        dumps = run_ranks(train_and_dump, world_size, argv, timeout_seconds=timeout_seconds)
        return Run(
            losses=read_lines(Path(folder) / "losses.jsonl"),
            rounds=read_lines(Path(folder) / "rounds.jsonl"),
            state=merge([dump["state"] for dump in dumps]),
            consumed_samples=dumps[0]["consumed_samples"],
            num_groups=[dump["num_groups"] for dump in dumps],
        )


def run_to_exit(
    world_size: int, function: Callable[..., Any], *args: Any, timeout_seconds: float = 90.0, **flags: Any
) -> list[RankResult]:
    """Run `function(argv, *args)` on every rank and return how each ended, whatever that is."""
    argv = tiny_gpt_arguments(**flags)
    return run_ranks(function, world_size, argv, *args, timeout_seconds=timeout_seconds, expect_exit=True)


def train_and_dump(argv: Sequence[str]) -> dict[str, Any]:
    """Train, then describe this rank's model and optimizer."""
    found: dict[str, Any] = {"num_groups": []}

    def around_train(original: Callable[..., Any]) -> Callable[..., Any]:
        def train_and_look(forward_step: Any, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(forward_step, model, optimizer, *args, **kwargs)
            host_args = importlib.import_module("megatron.training").get_args()
            found.update(state=dump_state(model[0], optimizer), consumed_samples=host_args.consumed_train_samples)
            return result

        return train_and_look

    def around_step(original: Callable[..., Any]) -> Callable[..., Any]:
        def step_and_count(*args: Any, **kwargs: Any) -> Any:
            c10d = importlib.import_module("torch.distributed.distributed_c10d")
            found["num_groups"].append(len(c10d._world.pg_map))
            return original(*args, **kwargs)

        return step_and_count

    with apply([_row("train", around_train), _row("train_step", around_step)]):
        train(argv)
    return found


def dump_state(ddp: Any, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Digests of everything a parameter is, by global name."""
    model = ddp.module
    while hasattr(model, "module"):
        model = model.module
    names = {id(parameter): name for name, parameter in model.named_parameters() if ".layers." not in name}
    for layer in model.decoder.layers:
        for name, parameter in layer.named_parameters():
            names[id(parameter)] = f"layer {layer.layer_number - 1} {name}"
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    inner = optimizer.chained_optimizers[0].optimizer
    groups = {id(parameter): group for group in inner.param_groups for parameter in group["params"]}
    state = {}
    for key, name in names.items():
        parameter = parameters[key]
        main = getattr(parameter, "main_param", None)
        optimised = parameter if main is None else main
        group = groups[id(optimised)]
        state[name] = {
            "parameter": digest(parameter),
            "main": None if main is None else digest(main),
            "moments": {
                moment: digest(value) if hasattr(value, "numel") else value
                for moment, value in sorted(inner.state[optimised].items())
            },
            "group": {name: group[name] for name in ("lr", "weight_decay", "wd_mult", "lr_mult")},
            "requires_grad": parameter.requires_grad,
            "attributes": sorted(name for name in vars(parameter) if name not in ("main_param", "main_grad")),
        }
    return state


def digest(tensor: Any) -> str:
    """A digest of the bytes of a tensor."""
    torch = importlib.import_module("torch")
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def merge(states: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """All ranks' states in one; replicas must agree."""
    merged: dict[str, dict[str, Any]] = {}
    for state in states:
        for name, described in state.items():
            assert merged.setdefault(name, described)["parameter"] == described["parameter"], f"{name} differs over ranks"
    return merged


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; none when it is not there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _row(name: str, wrap: Callable[..., Any]) -> Seam:
    return Seam(target=f"megatron.training.training:{name}", why="the test looks", remove_when="never", wrap=wrap)
