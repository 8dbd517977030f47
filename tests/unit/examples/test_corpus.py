"""The quickstart's corpus: what Megatron reads back, what is reused, and that equal inputs give equal bytes.

Wrong inputs have a file of their own, `test_corpus_errors.py`.
"""

import json
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics

import corpus
import corpus_tokens
import numpy
import pytest
import torch
from corpus import Corpus, build_corpus, main
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from sentencepiece import SentencePieceProcessor

DOCUMENTS = [
    "The pipeline is as fast as its slowest stage.\nA stage that waits costs what a stage that works costs.",
    "    def stage(layer):\n\treturn layer  # two  spaces, a tab\n",
    "Layers move between stages; no layer is lost, no layer is doubled. \u00e9 \u6f22\u5b57 \U0001f600 <s> </s> <unk>",
    "One stage, two stages, four stages: the layers stay in order, the losses stay equal in every bit.",
]
VOCAB_SIZE = 340
FILES = ("corpus_text_document.bin", "corpus_text_document.idx", "tokenizer.model", "corpus.json")


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "id": i}) + "\n" for i, text in enumerate(texts)), encoding="utf-8")
    return path


def read_back(made: Corpus) -> list[str]:
    """Decode what is on disk; each document must end with the end-of-document id and hold no other."""
    tokenizer = SentencePieceProcessor(model_file=str(made.tokenizer_model))
    data = IndexedDataset(str(made.data_prefix))
    texts = []
    for tokens in data[0 : len(data)]:
        *body, end = tokens.tolist()
        assert end == tokenizer.eos_id() and tokenizer.eos_id() not in body and tokenizer.unk_id() not in body
        texts.append(tokenizer.decode(body))
    assert data.document_indices.tolist() == list(range(len(data) + 1))
    assert (len(data), int(data.sequence_lengths.sum())) == (made.num_documents, made.num_tokens)
    return texts


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)


@pytest.fixture(scope="module")
def python_docs(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build_corpus([], tmp_path_factory.mktemp("docs"), 8000)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def megatron_tokenizer(made: Corpus) -> tuple[object, Namespace]:
    """Build the tokenizer as pretraining does; the second value holds what Megatron set on its arguments."""
    flags = dict(zip(made.megatron_flags[::2], made.megatron_flags[1::2], strict=True))
    args = Namespace(
        tokenizer_type=flags["--tokenizer-type"],
        tokenizer_model=flags["--tokenizer-model"],
        chat_template=None,
        tokenizer_sentencepiece_ignore_extra_whitespaces=True,
        tokenizer_sentencepiece_legacy=False,
        special_tokens=None,
        metadata_path=None,
        pad_vocab_size=True,
        padded_vocab_size=None,
        make_vocab_size_divisible_by=128,
        tensor_model_parallel_size=1,
        rank=0,
    )
    return build_tokenizer(args), args


def gpt_config(made: Corpus, sequence_length: int, path_to_cache: str | None) -> GPTDatasetConfig:
    return GPTDatasetConfig(
        random_seed=1,
        sequence_length=sequence_length,
        blend=([str(made.data_prefix)], None),
        split=made.split,
        tokenizer=megatron_tokenizer(made)[0],
        path_to_cache=path_to_cache,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )


def test_the_default_text_is_pythons_documentation_a_document_per_topic(python_docs: Corpus) -> None:
    assert read_back(python_docs) == [topics[name] for name in sorted(topics)]
    assert python_docs.vocab_size == 8000


def test_megatron_loads_the_tokenizer_and_agrees_with_the_data(python_docs: Corpus) -> None:
    tokenizer, args = megatron_tokenizer(python_docs)
    assert (tokenizer.vocab_size, args.padded_vocab_size) == (8000, 8064)
    assert tokenizer.eod == 2
    assert tokenizer.pad not in (tokenizer.eod, tokenizer.bos, tokenizer.unk, -1), "Megatron masks padding in the loss"
    data = IndexedDataset(str(python_docs.data_prefix))  # kept: its arrays are views that die with it
    first = data[0]
    assert first.dtype == numpy.uint16
    assert [*tokenizer.tokenize(topics[min(topics)]), tokenizer.eod] == first.tolist()
    assert tokenizer.detokenize(first[:-1].tolist()) == topics[min(topics)]


def test_gpt_dataset_gives_the_tokens_in_order(python_docs: Corpus, one_rank: None, tmp_path: Path) -> None:
    config = gpt_config(python_docs, sequence_length=64, path_to_cache=str(tmp_path))
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, [3000, 20, 0], lambda: True, config).build()
    assert len(train) >= 3000 and len(valid) >= 20 and test is None
    data = IndexedDataset(str(python_docs.data_prefix))
    stream = numpy.concatenate([data[int(document)] for document in train.document_index])
    for i in (0, 1, 2999):
        start = int(train.shuffle_index[i]) * 64
        assert train[i]["tokens"].tolist() == stream[start : start + 64].tolist()
        assert train[i]["labels"].tolist() == stream[start + 1 : start + 65].tolist()
        assert train[i]["loss_mask"].sum() == 64


@pytest.mark.parametrize("model_type", corpus.MODEL_TYPES)
def test_json_lines_come_back_exactly(jsonl: Path, tmp_path: Path, model_type: str) -> None:
    made = build_corpus([jsonl], tmp_path / "out", 305, model_type=model_type)
    assert read_back(made) == DOCUMENTS
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(FILES)


def test_a_text_file_is_split_at_blank_lines(tmp_path: Path) -> None:
    source = tmp_path / "notes.txt"
    source.write_bytes(b"\xef\xbb\xbf\r\n\r\nfirst line\r\n  second line\r\n \t \r\n\r\nlast block, no line end")
    assert read_back(build_corpus([source], tmp_path / "out", 280)) == [
        "first line\n  second line",
        "last block, no line end",
    ]


def test_several_inputs_in_the_order_given_with_blank_ones_counted(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "b.json", ["the body", "", " \n"], key="body")
    text = tmp_path / "a.txt"
    text.write_text("the text\n")
    made = build_corpus([lines, text, lines], tmp_path / "out", 275, json_key="body")
    assert read_back(made) == ["the body", "the text", "the body"]
    assert made.num_blank_documents == 4
    facts = json.loads(made.provenance.read_bytes())
    assert [source["name"] for source in facts["request"]["inputs"]] == [str(lines), str(text), str(lines)]
    assert facts["request"]["inputs"][1]["num_bytes"] == 9
    assert set(facts["request"]["versions"]) == {"python", "sentencepiece", "megatron-core"}


def test_lines_the_trainer_would_skip_are_cut_for_it(tmp_path: Path) -> None:
    text = "long words and tabs\t" * 2000
    made = build_corpus([write_jsonl(tmp_path / "in.jsonl", [text])], tmp_path / "out", 300)
    assert read_back(made) == [text]
    assert made.num_tokens < len(text) / 3, "the vocabulary was not learned from this line"


def test_a_large_text_is_sampled_evenly() -> None:
    found = corpus_tokens.survey(["a\nb\n\nc", " ", "d\te"], num_bytes=2 * 16 * 2**20)
    assert (found.num_documents, found.num_blank_documents, list(found.sample)) == (2, 1, ["a", "c", "e"])


@pytest.mark.parametrize("model_type", corpus.MODEL_TYPES)
def test_equal_input_gives_equal_bytes(jsonl: Path, tmp_path: Path, model_type: str) -> None:
    for name in ("one", "two"):
        build_corpus([jsonl], tmp_path / name, 305, model_type=model_type)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_a_second_run_reuses_and_a_changed_one_does_not(jsonl: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = build_corpus([jsonl], out, VOCAB_SIZE)
    stamp = made.data_prefix.with_suffix(".bin").stat().st_mtime_ns
    again = build_corpus([jsonl], out, VOCAB_SIZE)
    assert again.reused and not made.reused
    assert again.num_tokens == made.num_tokens and again.data_prefix.with_suffix(".bin").stat().st_mtime_ns == stamp

    assert not build_corpus([jsonl], out, VOCAB_SIZE - 1).reused
    write_jsonl(jsonl, DOCUMENTS[::-1])
    assert not build_corpus([jsonl], out, VOCAB_SIZE - 1).reused
    for name in FILES:
        (out / name).write_bytes((out / name).read_bytes()[:-3])
        assert not build_corpus([jsonl], out, VOCAB_SIZE - 1).reused, f"{name} was damaged"
    assert build_corpus([jsonl], out, VOCAB_SIZE - 1).reused
    assert read_back(build_corpus([jsonl], out, VOCAB_SIZE - 1)) == DOCUMENTS[::-1]


def test_indices_that_megatron_cached_for_an_older_corpus_go(jsonl: Path, tmp_path: Path, one_rank: None) -> None:
    def samples(made: Corpus) -> list[list[int]]:
        config = gpt_config(made, sequence_length=8, path_to_cache=None)
        train, *_ = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config).build()
        return [train[i]["tokens"].tolist() for i in range(10)]

    build_corpus([jsonl], tmp_path / "out", VOCAB_SIZE)
    samples(build_corpus([jsonl], tmp_path / "out", VOCAB_SIZE))
    write_jsonl(jsonl, DOCUMENTS[:2])
    fresh = samples(build_corpus([jsonl], tmp_path / "elsewhere", 305))
    assert samples(build_corpus([jsonl], tmp_path / "out", 305)) == fresh


@pytest.fixture(scope="module")
def tokenizer() -> SentencePieceProcessor:
    sample = corpus_tokens.survey(DOCUMENTS, num_bytes=1).sample
    return SentencePieceProcessor(model_proto=corpus_tokens.train_tokenizer(sample, VOCAB_SIZE, "bpe"))


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\u2581"), max_size=40))
def test_any_text_survives_the_tokenizer(tokenizer: SentencePieceProcessor, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_command_line_says_what_it_made(jsonl: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--input", str(jsonl), "--vocab-size", "305", "--out", str(tmp_path / "out")]
    for verb in ("wrote", "reused"):
        assert main(arguments) == 0
        shown = capfd.readouterr()
        assert shown.err == "", "no terminal, no progress"
        counts, flags = shown.out.splitlines()
        assert counts.startswith(f"{verb} 4 documents, ")
        assert counts.endswith(f" tokens, vocabulary 305; see {tmp_path}/out/corpus.json")
        assert flags == (
            f"train with --data-path {tmp_path}/out/corpus_text_document --tokenizer-type SentencePieceTokenizer "
            f"--tokenizer-model {tmp_path}/out/tokenizer.model --split 1,0,0"
        )


@pytest.mark.parametrize(("num_documents", "split"), [(1, "1,0,0"), (10, "1,0,0"), (11, "95,5,0"), (79, "95,5,0")])
def test_the_split_leaves_no_part_empty(python_docs: Corpus, num_documents: int, split: str) -> None:
    made = replace(python_docs, num_documents=num_documents)
    assert made.split == split and made.megatron_flags[-2:] == ["--split", split]
