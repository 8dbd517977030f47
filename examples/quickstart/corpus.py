"""Real input for the quickstart: plain text or JSON lines in, Megatron's indexed dataset and a tokenizer out.

    python examples/quickstart/corpus.py [--input FILE ...] [--vocab-size 8000] --out DIR

Without --input the text is Python's own documentation, which is on every machine. This file has the order of the
steps and the command line; `corpus_text.py` reads, `corpus_tokens.py` makes tokens, `corpus_folder.py` keeps the output
whole. It must not know how text is split, how tokens are stored or how files are replaced.
"""

import argparse
import importlib.metadata
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import corpus_folder
from corpus_text import CorpusError, Source, identify, read_documents
from corpus_tokens import survey, train_tokenizer, write_dataset
from rich.console import Console
from rich.progress import Progress

MODEL_TYPES = ("bpe", "unigram")
TOKENIZER_TYPE = "SentencePieceTokenizer"
_MAX_VOCAB_SIZE = 2**31 - 1
# Raise it when equal settings give other files than before, so that no old corpus is reused.
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus on disk, ready for Megatron."""

    data_prefix: Path
    """For --data-path: the .bin and .idx files without their suffix."""
    tokenizer_model: Path
    provenance: Path
    """JSON file: inputs with sizes and sha256, settings, versions, counts, and the digests of the other files."""
    num_documents: int
    num_blank_documents: int
    """JSON lines left out because their text was blank."""
    num_tokens: int
    """Tokens on disk, one end of document for each document included."""
    vocab_size: int
    """Pieces of the tokenizer; Megatron pads it further (--make-vocab-size-divisible-by)."""
    reused: bool
    """True when the same input and settings had been processed before and nothing was written."""

    @property
    def split(self) -> str:
        """Value for --split, with no empty part: Megatron loops for ever over a part that got no document.

        Its default of 969,30,1 needs more than 500 documents.
        """
        num_training_documents = round(0.95 * self.num_documents)
        return "95,5,0" if num_training_documents < self.num_documents else "1,0,0"

    @property
    def megatron_flags(self) -> list[str]:
        """The flags that train Megatron on this corpus, each followed by its value."""
        return [
            *("--data-path", str(self.data_prefix)),
            *("--tokenizer-type", TOKENIZER_TYPE),
            *("--tokenizer-model", str(self.tokenizer_model)),
            *("--split", self.split),
        ]


def build_corpus(
    inputs: Sequence[str | Path],
    out_dir: str | Path,
    vocab_size: int,
    *,
    json_key: str = "text",
    model_type: str = "bpe",
    progress: Progress | None = None,
) -> Corpus:
    """Make the corpus of `inputs` in `out_dir`, or find it there; to be called by one process, before the ranks start.

    Args:
        inputs: text files, or JSON lines by suffix .jsonl or .json; none stand for Python's documentation.
        out_dir: folder of the four files, made if missing. An older corpus in it is replaced, by rename, at the end.
        vocab_size: pieces of the tokenizer, special ones included.
        json_key: key of the text in a JSON line.
        model_type: kind of SentencePiece model, bpe or unigram.
        progress: a started progress display; none means silence.

    Raises:
        CorpusError: what the user gave cannot be used; `out_dir` is then as it was.

    """
    if not 0 < vocab_size <= _MAX_VOCAB_SIZE:
        raise CorpusError(f"--vocab-size: expected a number from 1 to {_MAX_VOCAB_SIZE}, found {vocab_size}")
    if model_type not in MODEL_TYPES:
        raise CorpusError(f"--model-type: expected one of {', '.join(MODEL_TYPES)}, found {model_type}")
    out_dir = Path(os.path.abspath(out_dir))
    sources = identify(inputs)
    request = _request(sources, vocab_size, json_key, model_type)
    if facts := corpus_folder.find(out_dir, request):
        return _corpus(out_dir, facts, reused=True)
    with corpus_folder.staging(out_dir) as folder:
        counts = _make(folder, sources, vocab_size, json_key, model_type, progress or Progress(disable=True))
        if identify(inputs) != sources:
            raise CorpusError(f"{_names(sources)}: expected a file at rest, found that it changed while being read")
        facts = corpus_folder.commit(folder, out_dir, request, counts)
    return _corpus(out_dir, facts, reused=False)


def _make(
    folder: Path, sources: Sequence[Source], vocab_size: int, json_key: str, model_type: str, progress: Progress
) -> dict[str, Any]:
    """Write tokenizer and dataset to `folder`; return the counts for corpus.json."""
    task = progress.add_task("reading", total=None)
    found = survey(read_documents(sources, json_key), sum(source.num_bytes for source in sources))
    if found.num_documents == 0:
        raise CorpusError(f"{_names(sources)}: expected text, found only blank space")
    progress.update(task, description="training the tokenizer")
    model = train_tokenizer(found.sample, vocab_size, model_type)
    (folder / corpus_folder.TOKENIZER_NAME).write_bytes(model)
    progress.update(task, description="writing tokens", total=found.num_documents)
    num_tokens, dtype = write_dataset(
        model,
        (text for text in read_documents(sources, json_key) if text.strip()),
        folder / corpus_folder.PREFIX_NAME,
        on_written=lambda num_documents: progress.advance(task, num_documents),
    )
    return {
        "num_documents": found.num_documents,
        "num_blank_documents": found.num_blank_documents,
        "num_tokens": num_tokens,
        "dtype": dtype,
    }


def _request(sources: Sequence[Source], vocab_size: int, json_key: str, model_type: str) -> dict[str, Any]:
    """Return all that decides the content of the files, in types that JSON gives back unchanged."""
    return {
        "format": _FORMAT,
        "inputs": [{"name": s.name, "num_bytes": s.num_bytes, "sha256": s.sha256} for s in sources],
        "vocab_size": vocab_size,
        "model_type": model_type,
        "json_key": json_key,
        "versions": {
            "python": platform.python_version(),
            "sentencepiece": importlib.metadata.version("sentencepiece"),
            "megatron-core": _megatron_version(),
        },
    }


def _megatron_version() -> str:
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        # Asking Megatron itself would import it, for seconds, even when the corpus is reused.
        return "a source checkout"


def _corpus(out_dir: Path, facts: dict[str, Any], *, reused: bool) -> Corpus:
    return Corpus(
        data_prefix=out_dir / corpus_folder.PREFIX_NAME,
        tokenizer_model=out_dir / corpus_folder.TOKENIZER_NAME,
        provenance=out_dir / corpus_folder.PROVENANCE_NAME,
        num_documents=facts["num_documents"],
        num_blank_documents=facts["num_blank_documents"],
        num_tokens=facts["num_tokens"],
        vocab_size=facts["request"]["vocab_size"],
        reused=reused,
    )


def _names(sources: Sequence[Source]) -> str:
    return "--input " + " ".join(source.name for source in sources)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, or 2 after one line on stderr."""
    args = _parser().parse_args(argv)
    errors = Console(stderr=True)
    try:
        with Progress(console=errors, transient=True, disable=not errors.is_terminal) as progress:
            corpus = build_corpus(
                args.input,
                args.out,
                args.vocab_size,
                json_key=args.json_key,
                model_type=args.model_type,
                progress=progress,
            )
    except CorpusError as error:
        errors.print(f"corpus.py: error: {error}", markup=False, highlight=False, emoji=False, soft_wrap=True)
        return 2
    Console().print(_summary(corpus), markup=False, highlight=False, emoji=False, soft_wrap=True)
    return 0


def _summary(corpus: Corpus) -> str:
    blank = f" ({corpus.num_blank_documents:,} blank ones left out)" if corpus.num_blank_documents else ""
    counts = f"{corpus.num_documents:,} documents{blank}, {corpus.num_tokens:,} tokens, vocabulary {corpus.vocab_size:,}"
    return (
        f"{'reused' if corpus.reused else 'wrote'} {counts}; see {corpus.provenance}\n"
        f"train with {shlex.join(corpus.megatron_flags)}"
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Keep to one line, like every other error here."""
        self.exit(2, f"{self.prog}: error: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="corpus.py", description="Turn text into an indexed dataset and a tokenizer for Megatron.")
    parser.add_argument(
        "--input",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="text, a document per block of lines, or JSON lines by suffix .jsonl or .json (default: Python's docs)",
    )
    parser.add_argument("--json-key", default="text", metavar="KEY", help="key of the text in JSON lines (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=8000, metavar="N", help="tokenizer pieces (%(default)s)")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="tokenizer kind (%(default)s)")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the four files")
    return parser


if __name__ == "__main__":
    sys.exit(main())
