"""A random stream for every layer, so that a layer draws the same dropout masks on whatever stage it runs.

Megatron seeds one set of streams per rank, with the pipeline stage in the seed: a layer draws what is left where it
happens to be. Here each run of a decoder layer in training gets streams whose seeds are hashes of (seed, layer, step,
micro-batch, stream, and the coordinates Megatron itself tells that stream apart by), and the rank's own streams are as
before when the layer is done. Nothing needs to be saved or moved: the masks follow from the numbers.

The step and the micro-batch stand in Megatron's own RNG tracker while a micro-batch runs forward. Recomputation restores
the tracker to what it was at the forward before it runs a layer again, so it finds the right ones in whatever order the
schedule comes back to them. This module must not know layouts or moves.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_dyn.host.seams import Seam
from megatron_dyn.ports import JobError

MOMENT = "megatron_dyn-moment"
"""Name in Megatron's tracker of the int64 tensor (step, micro-batch) of the forward that is running."""

DEFAULT = "default-rng"
"""Megatron's name for the generator's own stream, which its tracker does not hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this rank stands, as far as Megatron's streams depend on it; its pipeline stage must never be among it."""

    tensor: int = 0
    expert: int = 0
    expert_tensor: int = 0
    data: int = 0
    """0 on every rank unless `--data-parallel-random-init` asks for replicas that differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a layer: what its masks follow from, besides seed and ranks."""

    layer: str
    """`decoder 3` or `mtp 0`: ids are global and 0-based, and the two kinds number on their own."""
    step: int
    """Megatron's count of the steps done before this one; the same after a resume."""
    microbatch: int
    """Within the step, on the model chunk that holds the layer."""


_COORDINATES: dict[str, Callable[[Ranks], tuple[int, ...]]] = {
    # Hidden dropout works on what all tensor-parallel ranks hold alike, so they must draw alike.
    DEFAULT: lambda _ranks: (),
    "model-parallel-rng": lambda ranks: (ranks.tensor,),
    "expert-parallel-rng": lambda ranks: (ranks.expert, ranks.expert_tensor),
    "data-parallel-rng": lambda _ranks: (),
}
"""By stream: the coordinates on which Megatron lets it differ. Streams that are not here stay as they are."""


def stream_seed(seed: int, run: Run, stream: str, ranks: Ranks, *, sequence_parallel: bool) -> int:
    """Return the seed (64 bits) of `stream` in one run of a layer: the same number on every platform and at any layout.

    Raises KeyError for a stream that stays Megatron's.
    """
    # Under sequence parallelism each rank drops of its own part of the sequence.
    own_part = stream == DEFAULT and sequence_parallel
    place = (ranks.tensor,) if own_part else _COORDINATES[stream](ranks)
    named = f"{seed}/{ranks.data}/{run.layer}/{run.step}/{run.microbatch}/{stream}/{place}"
    return int.from_bytes(hashlib.blake2b(named.encode("ascii"), digest_size=8).digest(), "big")


class LayerStreams:
    """One per rank and job; its rows cover layers that arrive later as well, since they wrap the class."""

    def __init__(self, args: Any, ranks: Callable[[], Ranks] | None = None) -> None:
        """`args` are Megatron's; `ranks` None asks Megatron, whose groups exist only once training starts."""
        self._args = args
        self._ranks = ranks or (lambda: _megatron_ranks(args))

    def rows(self) -> tuple[Seam, ...]:
        """The ledger rows, in force for the whole run."""
        return (
            Seam(
                target="megatron.core.pipeline_parallel.schedules:forward_step",
                why="layers have to know the micro-batch they run, also when they are recomputed",
                remove_when="Megatron's dropout streams do not depend on the pipeline stage",
                parameters=("model", "current_microbatch"),
                wrap=self._around_forward,
            ),
            Seam(
                target="megatron.core.transformer.transformer_layer:TransformerLayer.__call__",
                why="a layer draws from its rank's streams: on another stage it would drop other elements",
                remove_when="Megatron's dropout streams do not depend on the pipeline stage",
                wrap=self._around_layer,
            ),
        )

    def _around_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(original)

        @wraps(original)
        def forward_step(*args: Any, **kwargs: Any) -> Any:
            microbatch = parameters.bind(*args, **kwargs).arguments.get("current_microbatch")
            if microbatch is None:
                return original(*args, **kwargs)
            tracker = get_cuda_rng_tracker()
            # Without any training (--skip-train) there is no count, and no layer that asks for it.
            moment = torch.tensor([getattr(self._args, "curr_iteration", 0), microbatch])
            tracker.set_states({**tracker.get_states(), MOMENT: moment})
            try:
                return original(*args, **kwargs)
            finally:
                # It must not end up in a checkpoint, which saves all that the tracker holds.
                states = tracker.get_states()
                del states[MOMENT]
                tracker.set_states(states)

        return forward_step

    def _around_layer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            # Not by whether gradients are on: the first run of a layer that will be recomputed has them off.
            if not layer.training:
                return original(layer, *args, **kwargs)
            with self._own_streams(layer):
                return original(layer, *args, **kwargs)

        return call

    @contextmanager
    def _own_streams(self, layer: Any) -> Iterator[None]:
        tracker, generator = get_cuda_rng_tracker(), torch.cuda.get_rng_state()
        states = tracker.get_states()
        run, ranks = _run(layer, states), self._ranks()

        def start(stream: str) -> torch.Tensor:
            sequence_parallel = layer.config.sequence_parallel
            torch.cuda.manual_seed(stream_seed(self._args.seed, run, stream, ranks, sequence_parallel=sequence_parallel))
            return torch.cuda.get_rng_state()

        before = {stream: state for stream, state in states.items() if stream in _COORDINATES}
        try:
            tracker.set_states({**states, **{stream: start(stream) for stream in before}})
            start(DEFAULT)
            yield
        finally:
            # What else the tracker holds keeps what the layer made of it, as without us.
            tracker.set_states({**tracker.get_states(), **before})
            torch.cuda.set_rng_state(generator)


def _run(layer: Any, states: dict[str, Any]) -> Run:
    """Name the run that begins; raises JobError where its micro-batch is not known."""
    kind = "mtp" if layer.is_mtp_layer else "decoder"
    name = f"{kind} {layer.layer_number - 1}"
    if MOMENT not in states:
        # Drawing from the rank's streams instead would train on, and no move would be exact any more.
        raise JobError(
            f"--dyn-rng-per-layer: layer {name} trains outside of Megatron's forward_step, so its micro-batch is not known; "
            "drop the flag"
        )
    step, microbatch = states[MOMENT].tolist()
    return Run(layer=name, step=step, microbatch=microbatch)


def _megatron_ranks(args: Any) -> Ranks:
    return Ranks(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
        data=parallel_state.get_data_parallel_rank() if args.data_parallel_random_init else 0,
    )
