"""From medians to a Sample, and from all Samples to the one Snapshot."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dyn import ports
from megatron_dyn.measure import AssembleError, Footprint, Kind, Position, Slot, StepReading, Window, assemble, make_sample
from megatron_dyn.records import Cost, Layout, Sample

LAYOUT = Layout.contiguous([2, 1])


def cost(forward, backward, *, size=0):
    return Cost(
        forward_seconds=forward,
        backward_seconds=backward,
        state_bytes=size,
        activation_bytes=size // 2,
        moved_bytes=size // 4,
    )


def sample(rank, pp_rank, layers, **changes):
    """A rank's sample in a job of two stages, with costs that differ from rank to rank."""
    scale = float(rank + 1)
    made = Sample(
        global_rank=rank,
        pp_rank=pp_rank,
        iteration=40,
        num_steps=3,
        num_microbatches=4,
        layers=tuple((layer, cost(scale, 2 * scale + layer, size=rank * 64)) for layer in layers),
        embedding=cost(0.5 * scale, 0.25) if pp_rank == 0 else None,
        head=cost(4.0, 5.0 * scale) if pp_rank == 1 else None,
        other_seconds=0.125 * scale,
        wait_seconds=1.0 / scale,
        optimizer_seconds=2.0 / scale,
        step_seconds=100.0 - rank,
    )
    return replace(made, **changes)


def two_replicas():
    """Data-parallel size 2: ranks 0 and 1 are stage 0, ranks 2 and 3 are stage 1."""
    return [sample(0, 0, (0, 1)), sample(1, 0, (0, 1)), sample(2, 1, (2,)), sample(3, 1, (2,))]


class TestMakeSample:
    MEDIANS = {
        Slot(Kind.LAYER, 5): 8.0,
        Slot(Kind.LAYER, 5, backward=True): 16.0,
        Slot(Kind.EMBEDDING): 4.0,
        Slot(Kind.HEAD, backward=True): 2.0,
        Slot(Kind.OTHER): 1.0,
        Slot(Kind.OTHER, backward=True): 3.0,
        Slot(Kind.WAIT): 7.0,
        Slot(Kind.OPTIMIZER): 9.0,
    }

    def sample(self, **changes):
        position = Position(global_rank=3, pp_rank=1, layers=(5, 6), has_embedding=True, has_head=True)
        sizes = Cost(state_bytes=10, activation_bytes=20, moved_bytes=30)
        window = Window(3)
        for factor in (2.0, 1.0, 0.5):
            seconds = {slot: factor * value for slot, value in self.MEDIANS.items()}
            window.add(StepReading(iteration=12, num_microbatches=4, seconds=seconds))
        return make_sample(
            replace(position, **changes),
            window,
            Footprint(layers={5: sizes, 6: sizes}, embedding=sizes, head=sizes),
            iteration=12,
            step_seconds=50.0,
        )

    def test_pieces_are_per_microbatch_and_the_rest_per_step(self):
        made = self.sample()
        sizes = {"state_bytes": 10, "activation_bytes": 20, "moved_bytes": 30}
        assert made.layers == (
            (5, Cost(forward_seconds=2.0, backward_seconds=4.0, **sizes)),
            (6, Cost(forward_seconds=0.0, backward_seconds=0.0, **sizes)),
        )
        assert made.embedding == Cost(forward_seconds=1.0, **sizes)
        assert made.head == Cost(backward_seconds=0.5, **sizes)
        assert made.other_seconds == 1.0
        assert (made.wait_seconds, made.optimizer_seconds, made.step_seconds) == (7.0, 9.0, 50.0)
        assert (made.global_rank, made.pp_rank, made.iteration, made.num_steps) == (3, 1, 12, 3)

    def test_every_sampled_step_is_kept_for_itself(self):
        assert self.sample().readings == ((12.0, 0.0), (6.0, 0.0), (3.0, 0.0))

    def test_ends_are_absent_where_they_are_not_held(self):
        made = self.sample(has_embedding=False, has_head=False)
        assert (made.embedding, made.head) == (None, None)


class TestAssemble:
    @given(st.permutations(range(4)))
    def test_the_snapshot_does_not_depend_on_the_order_of_the_samples(self, order):
        samples = two_replicas()
        assert assemble([samples[index] for index in order], LAYOUT) == assemble(samples, LAYOUT)

    def test_over_replicas_the_largest_reading_counts(self):
        snapshot = assemble(two_replicas(), LAYOUT)
        assert snapshot.layers == (cost(2, 4, size=64), cost(2, 5, size=64), cost(4, 10, size=192))
        assert snapshot.embedding == cost(1.0, 0.25)
        assert snapshot.head == cost(4.0, 20.0)
        assert (snapshot.step_seconds, snapshot.other_seconds) == (100.0, 0.5)
        assert (snapshot.iteration, snapshot.num_microbatches, snapshot.layout) == (40, 4, LAYOUT)

    def test_readings_are_joined_from_the_newest_step_back(self):
        samples = two_replicas()
        read = [((1.0, 9.0), (2.0, 3.0)), ((4.0, 2.0), (1.0, 1.0)), ((5.0,), (7.0,), (8.0,)), ((6.0,), (6.0,))]
        snapshot = assemble([replace(one, readings=steps) for one, steps in zip(samples, read, strict=True)], LAYOUT)
        assert snapshot.readings == ((4.0, 9.0, 7.0), (2.0, 3.0, 8.0))
        assert assemble(samples, LAYOUT).readings == ()

    def test_a_stage_is_its_slowest_replica(self):
        first, last = assemble(two_replicas(), LAYOUT).stages
        assert first.forward_seconds == 2 + 2 + 1.0 + 0.25
        assert first.backward_seconds == 4 + 5 + 0.25
        assert (first.wait_seconds, first.optimizer_seconds) == (0.5, 2.0)
        assert (first.state_bytes, first.activation_bytes) == (128, 64)
        assert last.seconds == 4 + 10 + 4.0 + 20.0 + 0.5

    def test_a_stage_without_layers_has_a_reading(self):
        samples = [sample(0, 0, (0, 1, 2)), sample(1, 1, ())]
        snapshot = assemble(samples, Layout.contiguous([3, 0]))
        assert len(snapshot.layers) == 3
        assert snapshot.stages[1].seconds == 4.0 + 10.0 + 0.25

    @given(st.permutations(range(4)))
    def test_nor_do_equally_slow_replicas_make_it_depend_on_the_order(self, order):
        samples = two_replicas()
        samples[1] = replace(samples[0], global_rank=1, wait_seconds=77.0)
        samples[3] = replace(samples[2], global_rank=3, wait_seconds=88.0)
        snapshot = assemble([samples[index] for index in order], LAYOUT)
        assert snapshot == assemble(samples, LAYOUT)
        assert [stage.wait_seconds for stage in snapshot.stages] == [77.0, 88.0]

    @pytest.mark.parametrize("name", ["iteration", "num_microbatches"])
    @pytest.mark.parametrize("value", [3, 1700])
    def test_ranks_that_measured_something_else_are_refused_with_both_values_and_their_ranks(self, name, value):
        samples = two_replicas()
        samples[2] = replace(samples[2], **{name: value})
        expected = getattr(samples[0], name)
        told = {expected: f"{expected} on ranks [0, 1, 3]", value: f"{value} on ranks [2]"}
        with pytest.raises(AssembleError) as caught:
            assemble(samples, LAYOUT)
        assert str(caught.value) == f"ranks measured different {name}: {'; '.join(told[key] for key in sorted(told))}"

    def test_layers_on_the_wrong_stage_are_refused_with_rank_stage_and_both_lists(self):
        samples = [sample(0, 0, (0, 2)), sample(1, 1, (1,))]
        with pytest.raises(AssembleError, match=r"rank 0 \(stage 0\) measured layers \[0, 2\].*'Et\*2\|tL'.*\[0, 1\]"):
            assemble(samples, LAYOUT)

    @pytest.mark.parametrize(("stages", "missing"), [([0, 2], [1]), ([1], [0, 2])])
    def test_stages_without_a_sample_are_named_with_the_layout(self, stages, missing):
        layout = Layout.contiguous([2, 1, 0])
        samples = [sample(pp_rank, pp_rank, layout.layers_of_stage(pp_rank)) for pp_rank in stages]
        with pytest.raises(AssembleError) as caught:
            assemble(samples, layout)
        assert str(caught.value) == f"no rank measured stages {missing} of layout 'Et*2|t|L'"

    def test_a_layer_that_its_stage_did_not_measure_is_refused_with_both_lists(self):
        with pytest.raises(AssembleError, match=r"rank 1 \(stage 1\) measured layers \[\].*'Et\*2\|tL'.*\[2\]"):
            assemble([sample(0, 0, (0, 1)), sample(1, 1, ())], LAYOUT)

    def test_what_cannot_be_assembled_ends_the_job_in_one_line(self):
        assert issubclass(AssembleError, ports.JobError)


def test_what_families_say_on_a_layer_comes_from_the_lowest_rank_that_says_anything():
    first, *others = two_replicas()
    assert assemble([first, *others], LAYOUT).notes == ()
    told = [replace(other, notes=tuple((layer, {"rank": other.global_rank}) for layer, _ in other.layers)) for other in others]
    assert assemble([first, *told], LAYOUT).notes == ({"rank": 1}, {"rank": 1}, {"rank": 2})
    only_last = [first, others[0], *told[1:]]
    assert assemble(only_last, LAYOUT).notes == ({}, {}, {"rank": 2})
