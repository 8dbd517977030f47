"""Streams per layer: seeds differ in every coordinate, recomputation draws again what it drew, and nothing leaks."""

from types import SimpleNamespace

import pytest
import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import random as host_random

from megatron_dyn.host.layer_rng import DEFAULT, MOMENT, LayerStreams, Ranks, Run, stream_seed
from megatron_dyn.ports import JobError

MODEL, EXPERT, DATA = "model-parallel-rng", "expert-parallel-rng", "data-parallel-rng"
RUN = {"layer": "decoder 3", "step": 5, "microbatch": 1}
WIDTH = 64


def seed_of(stream=DEFAULT, *, seed=1234, ranks=None, sequence_parallel=False, **run):
    return stream_seed(seed, Run(**(RUN | run)), stream, ranks or Ranks(), sequence_parallel=sequence_parallel)


class TestStreamSeed:
    def test_it_is_the_same_number_for_ever(self):
        # A run that is resumed under another release, or on another machine, must go on with the same masks.
        assert seed_of() == 11043012121236952827

    @pytest.mark.parametrize("stream", [DEFAULT, MODEL, EXPERT, DATA])
    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 1235},
            {"layer": "decoder 4"},
            {"layer": "mtp 3"},
            {"step": 6},
            {"microbatch": 2},
            {"ranks": Ranks(data=1)},
        ],
        ids=str,
    )
    def test_it_differs_in_each_coordinate(self, stream, change):
        assert seed_of(stream, **change) != seed_of(stream)

    def test_numbers_do_not_run_into_each_other(self):
        assert seed_of(step=1, microbatch=11) != seed_of(step=11, microbatch=1) != seed_of(step=1, microbatch=111)

    def test_streams_differ_from_each_other(self):
        assert len({seed_of(stream) for stream in (DEFAULT, MODEL, EXPERT, DATA)}) == 4

    @pytest.mark.parametrize(
        ("stream", "differs_by"),
        [(DEFAULT, set()), (MODEL, {"tensor"}), (EXPERT, {"expert", "expert_tensor"}), (DATA, set())],
    )
    def test_ranks_differ_where_those_of_megatron_do(self, stream, differs_by):
        differing = {
            name
            for name in ("tensor", "expert", "expert_tensor")
            if seed_of(stream, ranks=Ranks(**{name: 1})) != seed_of(stream)
        }
        assert differing == differs_by

    def test_under_sequence_parallelism_each_tensor_rank_drops_of_its_own_part(self):
        seeds = {seed_of(sequence_parallel=True, ranks=Ranks(tensor=tensor)) for tensor in range(4)}
        assert len(seeds) == 4

    def test_other_streams_have_none(self):
        with pytest.raises(KeyError, match="gtp-remat-rng"):
            seed_of("gtp-remat-rng")


class Layer(torch.nn.Module):
    """Drops elements twice, as a decoder layer does: from the rank's stream and from a tracked one."""

    def __init__(self, number, *, mtp=False):
        super().__init__()
        self.layer_number, self.is_mtp_layer = number, mtp
        self.config = SimpleNamespace(sequence_parallel=False)

    def forward(self, hidden):
        hidden = torch.nn.functional.dropout(hidden, 0.5, self.training)
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(hidden, 0.5, self.training)


@pytest.fixture
def tracker(cpu_platform, monkeypatch):
    """Megatron's tracker, seeded as on stage 0, and taken away afterwards."""
    monkeypatch.setattr(host_random, "_CUDA_RNG_STATE_TRACKER", None)
    monkeypatch.setattr(host_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", False)
    with torch.random.fork_rng(devices=[]):
        tensor_parallel.model_parallel_cuda_manual_seed(1234, tp_rank=0, ep_rank=0, etp_rank=0)
        yield tensor_parallel.get_cuda_rng_tracker()


class Job:
    """A stage whose schedule and layers are wrapped as `LayerStreams.rows` say."""

    def __init__(self, step=0):
        self.args = SimpleNamespace(seed=1234, curr_iteration=step)
        forward_row, layer_row = LayerStreams(self.args, Ranks).rows()
        self._forward = forward_row.wrap(self._run)
        self.call = layer_row.wrap(Layer.__call__)

    @staticmethod
    def _run(function, model, current_microbatch=None):
        return function(model)

    def forward(self, microbatch, function):
        """Run `function` as the forward of a micro-batch."""
        return self._forward(function, None, current_microbatch=microbatch)

    def masks(self, microbatch, *layers):
        """What each layer keeps of ones in a micro-batch."""
        return self.forward(microbatch, lambda _model: [self.call(layer, torch.ones(WIDTH)).tolist() for layer in layers])


def everything(tracker):
    """The state of every stream, as lists."""
    states = {name: state.tolist() for name, state in tracker.get_states().items()}
    return states | {DEFAULT: torch.get_rng_state().tolist()}


def disturb():
    """Draw, as other layers or another seed would have."""
    torch.rand(7)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        torch.rand(7)


def test_masks_follow_layer_step_and_microbatch_and_nothing_else(tracker):
    layer = Layer(4)
    masks = Job().masks(1, layer)
    disturb()
    assert Job().masks(1, Layer(3), layer)[1:] == masks
    others = [Job().masks(1, Layer(5)), Job().masks(2, layer), Job(step=1).masks(1, layer), Job().masks(1, Layer(4, mtp=True))]
    assert all(other != masks for other in others)
    assert len({str(other) for other in others}) == 4


def test_the_streams_of_the_rank_are_as_before(tracker):
    before = everything(tracker)
    Job().masks(0, Layer(1), Layer(2))
    assert everything(tracker) == before


def test_a_layer_that_fails_gives_the_streams_back(tracker):
    before = everything(tracker)
    with pytest.raises(TypeError):
        Job().forward(0, lambda _model: Job().call(Layer(1), "no tensor"))
    assert everything(tracker) == before


def test_a_stream_that_stays_megatrons_goes_on_as_without_us(tracker):
    tracker.add("gtp-remat-rng", 99)

    class Other(Layer):
        def forward(self, hidden):
            with tensor_parallel.get_cuda_rng_tracker().fork("gtp-remat-rng"):
                return torch.nn.functional.dropout(hidden, 0.5)

    first, second = (Job().masks(0, Other(1)) for _ in range(2))
    assert first != second


def test_evaluation_draws_nothing_and_needs_no_moment(tracker):
    before = everything(tracker)
    layer = Layer(1).eval()
    assert Job().call(layer, torch.ones(WIDTH)).tolist() == [1.0] * WIDTH
    assert Job().masks(0, layer) == [[1.0] * WIDTH]
    assert everything(tracker) == before


def test_training_outside_of_a_micro_batch_is_an_error(tracker):
    with pytest.raises(JobError, match="--dyn-rng-per-layer: layer decoder 0 trains outside of Megatron's forward_step"):
        Job().call(Layer(1), torch.ones(WIDTH))
    with pytest.raises(JobError, match="layer mtp 0 "):
        Job().masks(None, Layer(1, mtp=True))


def test_the_moment_is_there_during_the_forward_only(tracker):
    job = Job(step=7)
    assert job.forward(2, lambda _model: tracker.get_states()[MOMENT].tolist()) == [7, 2]
    assert MOMENT not in tracker.get_states()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)], ids=str)
def test_recomputation_draws_what_the_forward_drew_in_any_order(tracker, order):
    """Megatron's own checkpoint function, three micro-batches in flight, and two chunks' worth of layers between them."""
    job, layers = Job(step=3), [Layer(1), Layer(2)]

    def recomputed(_model):
        hidden = torch.ones(WIDTH, requires_grad=True)
        return hidden, tensor_parallel.checkpoint(lambda value: job.call(layers[1], job.call(layers[0], value)), False, hidden)

    in_flight = {}
    for microbatch in range(3):
        in_flight[microbatch] = job.forward(microbatch, recomputed)
        disturb()
    before = everything(tracker)
    for microbatch in order:
        job.args.curr_iteration = 99  # Only what the forward saw may count.
        hidden, output = in_flight[microbatch]
        output.backward(torch.ones(WIDTH))
        # The layers scale and drop, so the gradient is the mask of the recomputation and the output that of the forward.
        assert hidden.grad.tolist() == output.tolist()
    assert everything(tracker) == before
    assert len({str(output.tolist()) for _, output in in_flight.values()}) == 3


def test_a_part_of_a_layer_that_is_recomputed_alone_draws_the_same(tracker):
    class Selective(Layer):
        def forward(self, hidden):
            return tensor_parallel.checkpoint(super().forward, False, hidden)

    job, hidden = Job(), torch.ones(WIDTH, requires_grad=True)
    outputs = job.forward(0, lambda _model: job.call(Selective(1), hidden))
    job.masks(1, Layer(1))
    outputs.backward(torch.ones(WIDTH))
    assert hidden.grad.tolist() == outputs.tolist() == job.masks(0, Layer(1))[0]
