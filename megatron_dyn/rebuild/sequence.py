"""Vote, then commit or discard. The order of the steps is here and nowhere else; what each step does is the host's.

Before the vote nothing in the model has changed on any rank, so an abort is simply forgetting. After the vote a failure can
no longer be undone on the other ranks, so it ends the job with a clear error instead of training on, wrongly.
"""

import time
from collections.abc import Callable
from typing import Any

from megatron_dyn.ports import Collective, JobError, LayerStore
from megatron_dyn.records import Plan, Rebuilt


class RebuildError(JobError):
    """A commit failed after the vote; the job must end. The message names rank and step. The last checkpoint is good."""


def rebuild(
    plan: Plan, staged: Any, problem: str | None, *, pp_rank: int, store: LayerStore, collective: Collective
) -> Rebuilt:
    """Bring this rank from `plan.before` to `plan.after`, or leave it as it was.

    All ranks must call, at the step boundary. `staged` is what arrived, `problem` is this rank's no (from its
    Receipt). Raises RebuildError when a commit fails on any rank, CollectiveTimeout when a rank is gone.
    """
    started = time.perf_counter()
    leaving = tuple(move.layer for move in plan.moves if move.source == pp_rank)
    arriving = tuple(move.layer for move in plan.moves if move.destination == pp_rank)
    problem = problem or _attempt(lambda: store.prepare(plan, staged))
    votes: list[str | None] = collective.gather(problem, "vote on the move")
    noes = [f"rank {rank}: {vote}" for rank, vote in enumerate(votes) if vote]
    if noes:
        store.discard()
        return Rebuilt(
            layout=plan.before,
            committed=False,
            problem="; ".join(noes),
            attached_layers=(),
            detached_layers=(),
            seconds=time.perf_counter() - started,
        )

    def commit() -> None:
        store.detach(leaving)
        store.publish(plan.after)
        store.attach(arriving)
        if plan.touches(pp_rank):
            store.rewrap()

    failures: list[str | None] = collective.gather(_attempt(commit), "commit of the move")
    if any(failures):
        told = "; ".join(f"rank {rank}: {failure}" for rank, failure in enumerate(failures) if failure)
        raise RebuildError(f"commit of layout {plan.after.text} failed, restart from the last checkpoint: {told}")
    return Rebuilt(
        layout=plan.after,
        committed=True,
        problem=None,
        attached_layers=arriving,
        detached_layers=leaving,
        seconds=time.perf_counter() - started,
    )


def _attempt(step: Callable[[], None]) -> str | None:
    """Run one step; an exception becomes this rank's vote, so that the other ranks are not left waiting for it."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - whatever failed here, all ranks must hear of it
        return f"{type(error).__name__}: {error}"
    return None
