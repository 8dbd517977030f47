"""From documents to tokens: train a SentencePiece tokenizer, write Megatron's indexed dataset.

The tokenizer is lossless (identity normalisation, bytes for characters it has not learned, line feed and tab as pieces
of their own), save that U+2581, SentencePiece's sign for a space, comes back as a space. Equal documents give equal
bytes. Used by `corpus.py`; knows nothing of input files or output folders, and of flags only the names in its errors.
"""

import io
import logging
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import batched
from pathlib import Path
from types import ModuleType

from corpus_text import CorpusError
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

# More text than this hardly changes a vocabulary, but costs the unigram trainer minutes.
_SAMPLE_BYTES = 16 * 2**20
# SentencePiece drops longer lines without a word; 1,000 characters are at most 4,000 of the bytes it counts.
_MAX_LINE_CHARACTERS = 1000
_MAX_LINE_BYTES = 4 * _MAX_LINE_CHARACTERS
_DOCUMENTS_PER_BATCH = 256
_LOG_ERRORS_ONLY = 2
# SentencePiece tells the limits of a vocabulary only in the text of its error.
_TOO_LARGE = re.compile(r"set it to a value <= (\d+)")
_TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What one pass over the documents found."""

    num_documents: int
    """Documents with text in them: those that `write_dataset` is to be given."""
    num_blank_documents: int
    sample: Sequence[str]
    """Lines to train the tokenizer on, spread evenly over the text, about 16 MiB at most."""


def survey(texts: Iterable[str], num_bytes: int) -> Survey:
    """Read all `texts`, which are about `num_bytes` long together; errors of the iterator pass through."""
    stride = max(1, math.ceil(num_bytes / _SAMPLE_BYTES))
    num_documents = num_blank_documents = num_lines = 0
    sample: list[str] = []
    for text in texts:
        if not text.strip():
            num_blank_documents += 1
            continue
        num_documents += 1
        for line in _training_lines(text):
            if num_lines % stride == 0:
                sample.append(line)
            num_lines += 1
    return Survey(num_documents=num_documents, num_blank_documents=num_blank_documents, sample=sample)


def train_tokenizer(sample: Sequence[str], vocab_size: int, model_type: str) -> bytes:
    """Return a SentencePiece model of exactly `vocab_size` pieces, `model_type` being bpe or unigram.

    Ids 0 to 3 are unknown, begin, end (Megatron's end of document) and padding; padding has an id of its own because
    Megatron masks it out of the loss. Raises CorpusError where `sample` does not allow `vocab_size` pieces.
    """
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=model,
            model_type=model_type,
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n", "\t"],
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            max_sentence_length=_MAX_LINE_BYTES,
            num_threads=1,  # the order of its sums, hence the model, depends on the number of threads
            minloglevel=_LOG_ERRORS_ONLY,
        )
    except (RuntimeError, ValueError) as error:
        raise CorpusError(_explain(str(error), vocab_size, model_type)) from error
    return model.getvalue()


def write_dataset(model: bytes, texts: Iterable[str], path_prefix: Path, on_written: Callable[[int], None]) -> tuple[int, str]:
    """Write `path_prefix`.bin and .idx, each text one document that ends with the end-of-document id.

    Calls `on_written` with the number of documents of each batch. Returns the number of tokens, ends of documents
    included, and the name of the stored integer type. Raises OSError when the files cannot be written.
    """
    torch, indexed = _import_megatron()
    processor = SentencePieceProcessor(model_proto=model)
    dtype = indexed.DType.optimal_dtype(processor.get_piece_size())
    builder = indexed.IndexedDatasetBuilder(indexed.get_bin_path(str(path_prefix)), dtype=dtype)
    num_tokens = 0
    try:
        for batch in batched(texts, _DOCUMENTS_PER_BATCH):
            for ids in processor.encode(list(batch), add_eos=True, num_threads=1):
                builder.add_item(torch.tensor(ids))
                builder.end_document()
                num_tokens += len(ids)
            on_written(len(batch))
        builder.finalize(indexed.get_idx_path(str(path_prefix)))
    finally:
        builder.data_file.close()
    return num_tokens, dtype.__name__


def _training_lines(text: str) -> Iterator[str]:
    """Cut `text` into what the trainer accepts: it skips a line with a tab in it, and one that is too long."""
    for line in re.split(r"[\n\t]", text):
        for start in range(0, len(line), _MAX_LINE_CHARACTERS):
            piece = line[start : start + _MAX_LINE_CHARACTERS]
            if piece.strip():
                yield piece


def _explain(message: str, vocab_size: int, model_type: str) -> str:
    """Turn the trainer's error into a line for the user."""
    if limit := _TOO_LARGE.search(message):
        return f"--vocab-size: expected at most {limit[1]} for this text ({model_type}), found {vocab_size}"
    if limit := _TOO_SMALL.search(message):
        return f"--vocab-size: expected at least {limit[1]} for this text, found {vocab_size}"
    reason = " ".join(message.split())
    return f"--input: expected text that a tokenizer can be trained on, found that SentencePiece refuses it: {reason}"


def _import_megatron() -> tuple[ModuleType, ModuleType]:
    """Return torch and Megatron's indexed_dataset; late, because they take seconds, which a reused corpus need not pay.

    Silent, because their complaints about missing GPU libraries do not concern a file being written.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch
        from megatron.core.datasets import indexed_dataset
    return torch, indexed_dataset
