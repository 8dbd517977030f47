"""users.md C2 and C3 through the command; what it says is what Megatron's own reader says."""

from itertools import chain

import pytest

C2 = [
    ("Et*2|(t*2|)*34,t*3|(t*2|)*3,tL", 8, 5, 80, [10, 10, 10, 11, 10, 10, 10, 9], (7, 4)),
    ("Et*3|(tt|)*29,m|L", 16, 2, 61, [5] + [4] * 13 + [2, 2], (15, 1)),
    ("Ett|tt|ttt|tmL", 2, 2, 8, [5, 3], (1, 1)),
    ("Et|t|t|tL", 2, 2, 4, [2, 2], (1, 1)),
    ("E(|tt)*30,|mL", 16, 2, 60, [2] + [4] * 14 + [2], (15, 1)),
    ("E||t|L", 4, 1, 1, [0, 0, 1, 0], (3, 0)),
    ("Ett|tt|ttL|", 2, 2, 6, [4, 2], (0, 1)),
]


@pytest.mark.parametrize(("text", "pp", "num_virtual", "num_layers", "totals", "loss"), C2)
def test_public_layouts_are_explained(command, text, pp, num_virtual, num_layers, totals, loss):
    data = command("layout", text, "--pp", pp, "--json").json
    assert (data["num_virtual"], data["num_layers"]) == (num_virtual, num_layers)
    assert [stage["num_layers"] for stage in data["stages"]] == totals
    assert (data["loss"]["pp_rank"], data["loss"]["virtual"]) == loss
    assert sorted(chain.from_iterable(stage["layers"] for stage in data["stages"])) == list(range(num_layers))


@pytest.mark.parametrize(("text", "pp", "num_virtual", "num_layers", "totals", "loss"), C2)
def test_megatron_reads_the_same(command, text, pp, num_virtual, num_layers, totals, loss):
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    theirs = module.PipelineParallelLayerLayout(text, pp)
    flat = [kind.name for kind in theirs.flatten_layout]
    theirs.validate_layer_layout(flat.count("decoder"), flat.count("mtp"))
    names = {"embedding": "embedding", "num_mtp": "mtp", "loss": "loss"}
    for stage, rows in zip(command("layout", text, "--pp", pp, "--json").json["stages"], theirs.layout, strict=True):
        for chunk, row in zip(stage["chunks"], rows, strict=True):
            kinds = [kind.name for kind in row]
            assert len(chunk["layers"]) == kinds.count("decoder")
            assert {name: int(chunk[name]) for name in names} == {name: kinds.count(kind) for name, kind in names.items()}


@pytest.mark.parametrize(
    ("text", "pp", "words"),
    [
        ("Ett|tt|ttL|", 2, ["loss is on stage 0 (virtual 1), not on the last stage", "stage 1 (virtual 1) holds nothing"]),
        ("Et*3|(tt|)*29,m|L", 16, ["MTP layers are on stage 14 (virtual 1), apart from the last stage", "only L"]),
        ("E||t|L", 4, ["stage 0 holds no decoder layer, only E", "stage 1 holds nothing"]),
        ("Et|tL", 2, []),
    ],
)
def test_what_readers_do_not_expect_is_said(command, text, pp, words):
    ran = command("layout", text, "--pp", pp)
    notes = [line for line in ran.out.splitlines() if line.startswith("note:")]
    assert ran.code == 0
    assert bool(notes) == bool(words)
    assert all(any(word in note for note in notes) for word in words)


def test_a_person_reads_who_holds_what(command):
    out = command("layout", "Ett|tt|ttt|tmL", "--pp", 2).out
    assert "layout: Et*2|t*2|t*3|tmL" in out
    assert "8 layers and 1 MTP on 2 stages x 2 virtual; embedding on stage 0 (virtual 0), MTP on stage 1 (virtual 1)" in out
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in out.splitlines() if line.startswith("\u2502")]
    assert rows == [["0", "5", "Et*2 | t*3", "0-1 | 4-6"], ["1", "3", "t*2 | tmL", "2-3 | 7"]]


def test_without_pp_every_part_is_a_stage(command):
    assert command("layout", "Et|t|t|tL", "--json").json["num_stages"] == 4


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("Et|tm|tL", "--pp", 3), "a decoder layer (t) follows an MTP layer (m)"),
        (("Et| tL", "--pp", 2), "unknown letter ' ' in stage ' tL'"),
        (("et|tL", "--pp", 2), "unknown letter 'e' in stage 'et'"),
        (("Et|t|t|t|t|tL", "--pp", 4), "6 stages cannot be spread over 4 pipeline stages"),
        (("E|(t|)*10m|m|m|LL|LL", "--pp", 16), "stage 'LL' holds more than one embedding (E) or loss (L)"),
        (("EttL", "--num-layers", 3), "places 2 layers, the model has 3 (1 unassigned)"),
        (("--num-layers", 48, "--pp", 2, "--first", 11, "--last", 13), "24 unassigned"),
        (("--num-layers", 20, "--pp", 1, "--last", 1), "1 stage must hold all 20 layers"),
        (("--num-layers", 30, "--pp", 4), "30 layers on 4 stages: 2 unassigned"),
        (("--num-layers", 9, "--pp", 20_000), "--pp: expected a whole number from 1 to 16384, got '20000'"),
        (("--num-layers", 200_000, "--pp", 4), "--num-layers: expected a whole number from 1 to 100000"),
        (("--num-layers", 30), "expected a LAYOUT, or --num-layers with --pp"),
        (("EttL", "--first", 1), "expected --first with --num-layers and no LAYOUT"),
    ],
)
def test_refusals_name_the_token(command, words, problem):
    """users.md C2 and C3."""
    ran = command("layout", *words)
    assert (ran.code, ran.out) == (2, "")
    assert problem in ran.err.splitlines()[-1]
    # argparse shows the usage before its line.
    assert "argument --" in ran.err or (ran.err.startswith("megatron-dyn: error: ") and ran.err.count("\n") == 1)


def test_counts_that_add_up_are_laid_out(command):
    assert (
        command("layout", "--num-layers", 10, "--pp", 4, "--first", 1, "--last", 3, "--json").json["layout"]
        == "Et|t*3|t*3|t*3L"
    )
