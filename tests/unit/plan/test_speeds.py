"""Slow ranks and heavy layers: told apart once a layer was timed on two ranks, and not before."""

import pytest

from megatron_dyn.plan import Observation, SpeedHistory, Verdict, estimate_speeds, verdicts
from megatron_dyn.records import Cost, Layout, Snapshot


def observations(seconds_by_stage: list[list[float]]) -> list[Observation]:
    layers = [(stage, seconds) for stage, held in enumerate(seconds_by_stage) for seconds in held]
    return [Observation(layer=layer, pp_rank=stage, seconds=seconds) for layer, (stage, seconds) in enumerate(layers)]


def snapshot(layout: Layout, work: list[float], speeds: list[float]) -> Snapshot:
    stages = layout.stage_of()
    return Snapshot(
        iteration=10,
        layout=layout,
        layers=tuple(Cost(forward_seconds=cost / speeds[stages[layer]]) for layer, cost in enumerate(work)),
        embedding=Cost(),
        head=Cost(),
        other_seconds=0.0,
        stages=(),
        step_seconds=0.0,
        num_microbatches=4,
    )


class TestCaseC14:
    """The same stage totals 8/8/16/8 from a slow rank and from a heavy stage."""

    SLOW = [[1.0] * 8, [1.0] * 8, [2.0] * 8, [1.0] * 8]
    HEAVY = [[1.0] * 8, [1.0] * 8, [1.0] * 16, [1.0] * 8]
    TOTALS = (8.0, 8.0, 16.0, 8.0)

    def test_one_timing_of_each_layer_tells_nothing(self) -> None:
        for stages in (self.SLOW, self.HEAVY):
            estimate = estimate_speeds(observations(stages), 4)
            assert estimate.speeds == (None,) * 4
            assert estimate.usable is None
            assert verdicts(self.TOTALS, estimate) == (Verdict.EVEN, Verdict.EVEN, Verdict.UNTOLD, Verdict.EVEN)

    def test_layers_said_to_be_alike_tell_a_slow_rank(self) -> None:
        estimate = estimate_speeds(observations(self.SLOW), 4, alike=dict.fromkeys(range(32), "decoder"))
        assert estimate.usable == (1.0, 1.0, 0.5, 1.0)
        assert verdicts(self.TOTALS, estimate)[2] is Verdict.SLOW_DEVICE

    def test_layers_said_to_be_alike_tell_a_heavy_stage(self) -> None:
        estimate = estimate_speeds(observations(self.HEAVY), 4, alike=dict.fromkeys(range(40), "decoder"))
        assert estimate.speeds == (1.0,) * 4
        assert estimate.usable is None
        assert verdicts(self.TOTALS, estimate) == (Verdict.EVEN, Verdict.EVEN, Verdict.HEAVY_STAGE, Verdict.EVEN)

    def test_one_layer_timed_on_a_second_rank_tells_its_two_ranks(self) -> None:
        seen = [*observations(self.SLOW), Observation(layer=16, pp_rank=1, seconds=1.0)]
        estimate = estimate_speeds(seen, 4)
        assert estimate.speeds[0] is estimate.speeds[3] is None
        assert estimate.speeds[1] == pytest.approx(2 * estimate.speeds[2])

    def test_equal_layers_and_ranks_are_even(self) -> None:
        estimate = estimate_speeds(observations([[1.0] * 8] * 4), 4, alike=dict.fromkeys(range(32), 0))
        assert verdicts((8.0,) * 4, estimate) == (Verdict.EVEN,) * 4


def test_of_two_ranks_the_slower_one_is_slow() -> None:
    estimate = estimate_speeds(observations([[1.0] * 8, [2.0] * 8]), 2, alike=dict.fromkeys(range(16), "decoder"))
    assert estimate.speeds == (1.0, 0.5)
    assert verdicts((8.0, 16.0), estimate) == (Verdict.EVEN, Verdict.SLOW_DEVICE)
    # Ranks that were not compared count like those that are well.
    linked = [*observations([[1.0], [1.0], [2.0], [1.0]]), Observation(layer=1, pp_rank=2, seconds=2.0)]
    assert estimate_speeds(linked, 4).usable == (1.0, 1.0, 0.5, 1.0)


def test_noise_is_not_taken_for_speed() -> None:
    estimate = estimate_speeds(observations([[1.0, 1.1], [1.05, 0.95], [1.1, 1.12]]), 3, alike=dict.fromkeys(range(6), 0))
    assert estimate.usable is None


@pytest.mark.parametrize(
    ("seen", "message"),
    [
        (Observation(layer=3, pp_rank=0, seconds=0.0), "observation of layer 3: expected seconds above 0, got 0.0"),
        (Observation(layer=3, pp_rank=4, seconds=1.0), "observation of layer 3: expected a rank below 4, got 4"),
    ],
)
def test_impossible_observations_are_refused(seen: Observation, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate_speeds([seen], 4)


class TestHistory:
    BEFORE, AFTER = Layout.contiguous([4, 4, 4]), Layout.contiguous([5, 4, 3])
    SPEEDS = [1.0, 1.0, 0.5]

    def told(self, work_before: list[float], work_after: list[float]) -> SpeedHistory:
        history = SpeedHistory().observe(snapshot(self.BEFORE, work_before, self.SPEEDS))
        return history.observe(snapshot(self.AFTER, work_after, self.SPEEDS))

    def test_a_move_tells_the_ranks_it_went_between(self) -> None:
        # Layer 4 goes from rank 1 to rank 0, layer 8 from rank 2 to rank 1.
        assert self.told([1.0] * 12, [1.0] * 12).estimate(3).usable == (1.0, 1.0, 0.5)

    def test_what_all_layers_drift_by_is_no_speed(self) -> None:
        assert self.told([1.0] * 12, [3.0] * 12).estimate(3).usable == (1.0, 1.0, 0.5)

    def test_without_a_move_nothing_is_told(self) -> None:
        history = SpeedHistory().observe(snapshot(self.BEFORE, [1.0] * 12, self.SPEEDS))
        history = history.observe(snapshot(self.BEFORE, [1.0] * 12, self.SPEEDS))
        assert history.estimate(3).speeds == (None, None, None)

    def test_moves_that_contradict_each_other_tell_nothing(self) -> None:
        history = SpeedHistory()
        for layout, work in (
            (self.BEFORE, [1.0] * 12),
            (self.AFTER, [1.0] * 4 + [2.0] + [1.0] * 7),
            (self.BEFORE, [1.0] * 4 + [2.0] + [1.0] * 7),
        ):
            history = history.observe(snapshot(layout, work, [1.0] * 3))
        assert history.estimate(3).speeds[0] is None

    def test_layers_that_froze_and_moved_are_no_fast_rank(self) -> None:
        history = SpeedHistory().observe(snapshot(Layout.contiguous([6, 6, 6, 6]), [3.0] * 24, [1.0] * 4))
        history = history.observe(snapshot(Layout.contiguous([8, 6, 5, 5]), [1.0] * 8 + [3.0] * 16, [1.0] * 4))
        assert history.estimate(4).speeds == (None,) * 4

    def test_a_rank_that_is_well_again_is_forgotten(self) -> None:
        history = self.told([1.0] * 12, [1.0] * 12)
        assert history.estimate(3).usable == (1.0, 1.0, 0.5)
        history = history.observe(snapshot(self.AFTER, [1.0] * 12, [1.0, 1.0, 1.0]))
        assert history.estimate(3).usable is None

    def test_only_the_newest_comparisons_count(self) -> None:
        history = SpeedHistory()
        for turn in range(40):
            layout = self.AFTER if turn % 2 else self.BEFORE
            speeds = [1.0, 1.0, 0.5] if turn < 20 else [1.0, 1.0, 1.0]
            history = history.observe(snapshot(layout, [1.0] * 12, speeds))
        assert history.estimate(3).usable is None
        assert len(history.ratios) == 16
