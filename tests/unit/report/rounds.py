"""Rounds for the tests of the report: small, complete, and with a different number in every place."""

from dataclasses import replace

from megatron_dyn.records import Cost, Layout, Move, Outcome, RoundReport, Snapshot, StageReading


def small_snapshot(*, busy=((0.1, 0.2), (0.15, 0.35)), step_seconds=2.0):
    """Three layers on two stages; `busy` is (forward, backward) seconds of each stage's micro-batch."""
    costs = tuple(
        Cost(
            forward_seconds=0.01 * (layer + 1),
            backward_seconds=0.02 * (layer + 1),
            state_bytes=(layer + 1) * 2**20,
            activation_bytes=(layer + 1) * 2**19,
            moved_bytes=(layer + 1) * 2**18,
        )
        for layer in range(3)
    )
    return Snapshot(
        iteration=40,
        layout=Layout.contiguous([2, 1]),
        layers=costs,
        embedding=Cost(forward_seconds=0.004, backward_seconds=0.005),
        head=Cost(forward_seconds=0.05, backward_seconds=0.06, state_bytes=7 * 2**20, moved_bytes=2**16),
        other_seconds=0.001,
        stages=tuple(
            StageReading(
                forward_seconds=forward,
                backward_seconds=backward,
                wait_seconds=0.25 * (pp_rank + 1),
                optimizer_seconds=0.2,
                state_bytes=2**20,
                activation_bytes=2**19,
            )
            for pp_rank, (forward, backward) in enumerate(busy)
        ),
        step_seconds=step_seconds,
        num_microbatches=4,
    )


def committed_round(**changes):
    """A round that moved layer 1 from stage 0 to stage 1."""
    report = RoundReport(
        round=3,
        iteration=40,
        outcome=Outcome.COMMIT,
        reason="saves 60 s in 100 steps",
        layout_before="Et*2|tL",
        layout_after="Et|t*2L",
        moves=(Move(layer=1, source=0, destination=1),),
        snapshot=small_snapshot(),
        predicted_before_seconds=2.0,
        predicted_after_seconds=1.4,
        predicted_cost_seconds=1.1,
        measured_before_seconds=2.0,
        tokens_per_step=1000,
        moved_bytes=4096,
        measuring_seconds=0.031,
        deciding_seconds=0.0042,
        moving_seconds=0.57,
        peak_extra_bytes=8192,
    )
    return replace(report, **changes)


def no_change_round(**changes):
    """A round that left all as it was, for want of measurements."""
    report = RoundReport(
        round=4,
        iteration=50,
        outcome=Outcome.NO_CHANGE,
        reason="the current split [2, 1] is already the best",
        layout_before="Et*2|tL",
        layout_after="Et*2|tL",
    )
    return replace(report, **changes)
