"""The layout record reads and writes what Megatron does, and refuses what Megatron refuses, naming the token."""

from collections.abc import Callable, Iterator
from itertools import accumulate
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_dyn.records import Chunk, Layout, LayoutError, even_layout, uniform_layout

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Examples take as long as they take: a busy machine is no reason to fail."""

MegatronReader = Callable[[str, int], list[tuple[int, int]]]


@pytest.fixture(scope="module")
def megatron_state() -> Iterator[ModuleType]:
    """Megatron's parallel_state, without virtual stages again afterwards."""
    state = pytest.importorskip("megatron.core.parallel_state")
    yield state
    state.set_virtual_pipeline_model_parallel_world_size(None)


@pytest.fixture(scope="module")
def megatron_reader(megatron_state: ModuleType) -> MegatronReader:
    """Megatron's own (decoder count, offset) of each chunk in layer order; raises what Megatron raises."""
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    decoder = pytest.importorskip("megatron.core.transformer.enums").LayerType.decoder

    def read(text: str, num_stages: int) -> list[tuple[int, int]]:
        theirs = module.PipelineParallelLayerLayout(text, num_stages)
        flat = [layer.name for layer in theirs.flatten_layout]
        theirs.validate_layer_layout(flat.count("decoder"), flat.count("mtp"))
        num_virtual = theirs.virtual_pipeline_model_parallel_size
        megatron_state.set_virtual_pipeline_model_parallel_world_size(num_virtual)
        return [
            (
                theirs.get_num_layers_to_build(decoder, vp_stage=vp_stage, pp_rank=pp_rank),
                theirs.get_layer_offset(decoder, vp_stage=vp_stage, pp_rank=pp_rank),
            )
            for vp_stage in range(num_virtual)
            for pp_rank in range(num_stages)
        ]

    return read


ACCEPTED = [
    ("Et*18|t*24|t*24|t*12m*7L", 4, [18, 24, 24, 12]),
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, [2] * 35 + [3] + [2] * 3 + [1]),
    ("Et*3|(tt|)*29,m|L", 16, [3] + [2] * 29 + [0, 0]),
    ("Ett|tt|ttt|tmL", 2, [2, 2, 3, 1]),
    ("Et|t|t|tL", 2, [1, 1, 1, 1]),
    ("E(|tt)*30,|mL", 16, [0] + [2] * 30 + [0]),
    ("E||t|L", 4, [0, 0, 1, 0]),
    ("Ett|tt|ttL|", 2, [2, 2, 2, 0]),
]


@pytest.mark.parametrize(("text", "num_stages", "counts"), ACCEPTED)
def test_public_layouts_are_read_and_written(text: str, num_stages: int, counts: list[int]) -> None:
    """users.md C2: the counts, and the text form parses back to the same layout."""
    layout = Layout.parse(text, num_stages)
    assert list(layout.counts) == counts
    assert layout.num_layers == sum(counts)
    assert layout.num_virtual == len(counts) // num_stages
    assert Layout.parse(layout.text, num_stages) == layout


def test_public_totals_per_rank() -> None:
    """users.md C2: 80 layers over 8 ranks of 5 chunks; where MTP and loss sit; a loss that is not on the last rank."""
    layout = Layout.parse("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8)
    assert [len(layout.layers_of_stage(pp_rank)) for pp_rank in range(8)] == [10, 10, 10, 11, 10, 10, 10, 9]
    standalone = Layout.parse("Et*3|(tt|)*29,m|L", 16)
    assert (standalone.num_layers, standalone.chunks[30].num_mtp, standalone.chunks[31].loss) == (61, 1, True)
    assert [index % 2 for index, chunk in enumerate(Layout.parse("Ett|tt|ttL|", 2).chunks) if chunk.loss] == [0]


@pytest.mark.parametrize(("text", "num_stages", "counts"), ACCEPTED)
def test_public_layouts_mean_the_same_to_megatron(
    text: str, num_stages: int, counts: list[int], megatron_reader: MegatronReader
) -> None:
    """Same counts and offsets from the text as given and from the text as we write it."""
    expected = list(zip(counts, accumulate(counts, initial=0), strict=False))
    assert megatron_reader(text, num_stages) == expected
    assert megatron_reader(Layout.parse(text, num_stages).text, num_stages) == expected


REFUSED = [
    ("Et|tm|tL", 3, r"decoder layer \(t\) follows an MTP layer"),
    ("Et| tL", 2, "unknown letter ' ' in stage ' tL'"),
    ("et|tL", 2, "unknown letter 'e' in stage 'et'"),
    ("Et|t|t|t|t|tL", 4, "6 stages cannot be spread over 4 pipeline stages"),
    ("E|(t|)*10m|m|m|LL|LL", 16, "stage 'LL' holds more than one"),
    ("Et|m|m|tL", 4, "share one stage, found in 2"),
    ("Et|m|mL", 3, "share one stage, found in 2"),
    ("Etm|tL", 2, "follows an MTP layer"),
    ("tE|tL", 2, "stage 'tE' is out of order"),
    ("Et|mtL", 2, "stage 'mtL' is out of order"),
    ("EEt|tL", 2, "stage 'EEt' holds more than one"),
    ("Et|EtL", 2, r"exactly one embedding \(E\), got 2"),
    ("t|tL", 2, r"exactly one embedding \(E\), got 0"),
    ("Et|t", 2, r"exactly one loss \(L\), got 0"),
    ("t|EtL", 2, "first layer must be the embedding.*got 't'"),
    ("EtL|t", 2, "last layer must be the loss.*got 't'"),
    ("Et|m|t|L", 2, "follows an MTP layer"),
    ("E|m||L", 2, "last virtual stage of their rank"),
    ("E(t|tL", 2, r"unknown letter '\('"),
    ("", 1, r"exactly one embedding \(E\), got 0"),
]


@pytest.mark.parametrize(("text", "num_stages", "message"), REFUSED)
def test_bad_layouts_are_refused_by_token(text: str, num_stages: int, message: str) -> None:
    """users.md C2: each refusal says what is wrong where."""
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text, num_stages)


@pytest.mark.parametrize(("text", "num_stages", "message"), REFUSED)
def test_megatron_refuses_them_too(text: str, num_stages: int, message: str, megatron_reader: MegatronReader) -> None:
    """Nothing that runs today is refused by us."""
    with pytest.raises((AssertionError, IndexError)):
        megatron_reader(text, num_stages)


def written_chunks() -> st.SearchStrategy[str]:
    """One stage as a user writes it, with commas and multiplications."""
    letters = st.sampled_from(["t", "tt", "t*3", "t,t", "t*0"])
    return st.lists(letters, max_size=3).map("".join)


@st.composite
def written_layouts(draw: st.DrawFn) -> tuple[str, int]:
    """A layout text and a number of stages; right in most cases, with MTP, repetitions, empty and virtual stages."""
    num_stages = draw(st.integers(1, 4))
    pieces = [draw(written_chunks()) for _ in range(num_stages * draw(st.integers(1, 3)))]
    pieces[0] = "E" + pieces[0]
    mtp = draw(st.integers(0, 2))
    if mtp:
        pieces[draw(st.integers(max(0, len(pieces) - 3), len(pieces) - 1))] += f"m*{mtp}"
    pieces[-1] += "L"
    text = "|".join(pieces)
    repeat = draw(st.integers(2, 3))
    return (text.replace("|t", f"|(t|)*{repeat * num_stages}t", 1), num_stages) if draw(st.booleans()) else (text, num_stages)


def ours(text: str, num_stages: int) -> list[tuple[int, int]] | None:
    """(Decoder count, offset) of each chunk, None if refused."""
    try:
        layout = Layout.parse(text, num_stages)
    except LayoutError:
        return None
    firsts = [layout.layers_of_chunk(index).start for index in range(len(layout.chunks))]
    return list(zip(layout.counts, firsts, strict=True))


def theirs(reader: MegatronReader, text: str, num_stages: int) -> list[tuple[int, int]] | None:
    """The same from Megatron."""
    try:
        return reader(text, num_stages)
    except (AssertionError, IndexError):
        return None


@settings(PATIENT, max_examples=300)
@given(written_layouts())
def test_any_layout_means_the_same_to_megatron(megatron_reader: MegatronReader, written: tuple[str, int]) -> None:
    """Accepted by both with equal counts and offsets, or refused by both; and our text form too."""
    text, num_stages = written
    expected = theirs(megatron_reader, text, num_stages)
    assert ours(text, num_stages) == expected
    if expected is not None:
        assert megatron_reader(Layout.parse(text, num_stages).text, num_stages) == expected


@settings(PATIENT, max_examples=400)
@given(st.text(alphabet="EtmL|,()*23 x", max_size=14), st.integers(1, 3))
def test_any_text_is_judged_as_by_megatron(megatron_reader: MegatronReader, text: str, num_stages: int) -> None:
    """Garbage included: never an exception other than LayoutError."""
    assert ours(text, num_stages) == theirs(megatron_reader, text, num_stages)


@PATIENT
@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 4))
def test_every_layer_is_on_one_stage(counts: list[int], num_stages: int) -> None:
    """The views agree: by chunk, by stage, by layer; each id once."""
    counts = counts * num_stages
    layout = Layout.contiguous(counts, num_stages=num_stages)
    by_chunk = [layer for index in range(len(counts)) for layer in layout.layers_of_chunk(index)]
    assert by_chunk == list(range(layout.num_layers))
    for stage in range(num_stages):
        chunks = layout.layers_by_chunk(stage)
        assert chunks == tuple(layout.layers_of_chunk(index) for index in range(stage, len(counts), num_stages))
        assert len(chunks) == layout.num_virtual
        assert tuple(layer for chunk in chunks for layer in chunk) == layout.layers_of_stage(stage)
    by_stage = {layer: stage for stage in range(num_stages) for layer in layout.layers_of_stage(stage)}
    assert tuple(by_stage[layer] for layer in range(layout.num_layers)) == layout.stage_of()
    assert Layout.parse(layout.text, num_stages) == layout


def test_with_counts_keeps_the_ends() -> None:
    """users.md C1: MTP and loss stay last."""
    layout = Layout.parse("Et*18|t*24|t*24|t*12m*7L", 4)
    assert layout.with_counts([24, 23, 23, 8]).text == "Et*24|t*23|t*23|t*8m*7L"


@pytest.mark.parametrize("counts", [[24, 23, 23, 9], [24, 54], [25, 23, 23, 8, -1], [-1, 24, 24, 31]])
def test_with_counts_loses_and_invents_no_layer(counts: list[int]) -> None:
    """The message holds the counts and the number of layers."""
    layout = Layout.parse("Et*18|t*24|t*24|t*12m*7L", 4)
    with pytest.raises(LayoutError, match="do not place 78 layers on 4 stages"):
        layout.with_counts(counts)


def test_with_counts_puts_no_layer_behind_mtp() -> None:
    """What Megatron refuses cannot be made either."""
    with pytest.raises(LayoutError, match="follows an MTP layer"):
        Layout.parse("Ett|ttm|L", 3).with_counts([1, 2, 1])


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "first", "last", "counts"),
    [
        (32, 4, None, None, (8, 8, 8, 8)),
        (10, 4, 1, 3, (1, 3, 3, 3)),
        (11, 2, 5, 6, (5, 6)),
        (7, 3, None, 1, (3, 3, 1)),
        (20, 1, None, None, (20,)),
        (20, 1, 20, None, (20,)),
    ],
)
def test_uniform_layouts(
    num_layers: int, num_stages: int, first: int | None, last: int | None, counts: tuple[int, ...]
) -> None:
    """The split Megatron makes from counts, each layer once."""
    layout = uniform_layout(num_layers, num_stages, first=first, last=last)
    assert layout == Layout.contiguous(counts)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "first", "last", "message"),
    [
        (48, 2, 11, 13, "24 unassigned"),
        (20, 1, None, 1, "must hold all 20 layers, got last 1$"),
        (20, 1, 1, 20, "must hold all 20 layers, got first 1, last 20$"),
        (30, 4, None, None, "^30 layers on 4 stages: 2 unassigned$"),
        (30, 4, None, 1, r"^30 layers on 4 stages \(last 1\): 2 unassigned$"),
        (10, 4, 1, 2, r"^10 layers on 4 stages \(first 1, last 2\): 1 unassigned$"),
        (4, 3, 3, 2, "-1 unassigned"),
    ],
)
def test_counts_that_lose_layers_are_refused(
    num_layers: int, num_stages: int, first: int | None, last: int | None, message: str
) -> None:
    """users.md C3: cases that were built with layers missing, without an error."""
    with pytest.raises(LayoutError, match=message):
        uniform_layout(num_layers, num_stages, first=first, last=last)


@pytest.mark.parametrize(("num_layers", "difference"), [(7, "1 too many"), (10, "2 unassigned")])
def test_a_layout_of_another_model_is_refused(num_layers: int, difference: str) -> None:
    """Expected, actual and the difference."""
    with pytest.raises(LayoutError, match=f"places 8 layers, the model has {num_layers} .{difference}.$"):
        Layout.contiguous([4, 4]).check_num_layers(num_layers)


def test_a_layout_needs_a_stage() -> None:
    """The first thing that is checked."""
    with pytest.raises(LayoutError, match="at least 1, got 0"):
        Layout(chunks=(Chunk(embedding=True, loss=True),), num_stages=0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"Et*{'9' * 5000}L", "expected at most 100000 repeats, got 't.9999"),
        ("E(t*100000|)*100000L", "expected at most 1000000 letters"),
        ("Et*\u0661L", "unknown letter"),
    ],
)
def test_repeats_that_would_fill_the_memory_are_refused(text: str, message: str) -> None:
    """Before they are written out."""
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text)


def test_layers_are_spread_evenly_between_the_ends():
    assert even_layout(7, 4, 2, num_mtp=1) == Layout.parse("Et|tt|tt|ttmL", 2)
