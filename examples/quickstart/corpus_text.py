"""Where the words come from: files, or Python's own documentation, read as a stream of documents.

Every complaint about an input is made here, with the file and the place in it, before anything is written. Used by
`corpus.py`; knows neither tokenizers nor Megatron, and keeps no more than one document in memory.
"""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

JSON_SUFFIXES = (".jsonl", ".json")
_MAX_KEYS_SHOWN = 5


class CorpusError(ValueError):
    """Something the user can put right; its text is one line that names the file or flag, expected and found."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """Identity of one input: equal sources give equal documents."""

    name: str
    """Absolute path of the file, or the module and Python version of the default text."""
    num_bytes: int
    sha256: str
    path: Path | None
    """None for the default text."""


def identify(inputs: Sequence[str | Path]) -> tuple[Source, ...]:
    """Return the identity of each input in the given order; no inputs stand for Python's documentation.

    Raises CorpusError for an input that is missing, not a regular file, empty or unreadable.
    """
    if not inputs:
        text = "\n\n".join(_topics()).encode()
        name = f"pydoc_data.topics of Python {platform.python_version()}"
        return (Source(name=name, num_bytes=len(text), sha256=hashlib.sha256(text).hexdigest(), path=None),)
    return tuple(_identify_file(Path(os.path.abspath(path))) for path in inputs)


def read_documents(sources: Sequence[Source], json_key: str) -> Iterator[str]:
    """Yield the documents of all sources, in order, blank ones of JSON lines included.

    A document is a topic of the default text, the string under `json_key` of a JSON line (by suffix), or in any
    other file a block of lines between blank lines. Raises CorpusError, with the place, for NUL bytes, bytes that are
    not UTF-8, a broken JSON line, and a key that is absent or holds no string.
    """
    for source in sources:
        if source.path is None:
            yield from _topics()
        elif source.path.suffix.lower() in JSON_SUFFIXES:
            yield from _json_texts(source.path, json_key)
        else:
            yield from _paragraphs(source.path)


def _topics() -> list[str]:
    try:
        # Imported late: some distributions strip pydoc's data, and a user's own text must work without it.
        from pydoc_data.topics import topics
    except ImportError as error:
        raise CorpusError(
            "default corpus: expected the module pydoc_data.topics of Python's standard library, found none; pass --input FILE"
        ) from error
    return [topics[name] for name in sorted(topics)]


def _identify_file(path: Path) -> Source:
    try:
        if not path.exists():
            raise CorpusError(f"--input {path}: expected a text or JSONL file, found nothing there")
        # A pipe is refused because the text is read more than once.
        if not path.is_file():
            kind = "a directory" if path.is_dir() else "something else"
            raise CorpusError(f"--input {path}: expected a regular file, found {kind}")
        with path.open("rb") as handle:
            sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
            num_bytes = handle.tell()
    except OSError as error:
        raise _unreadable(path, error) from error
    if num_bytes == 0:
        raise CorpusError(f"--input {path}: expected text, found an empty file (0 bytes)")
    return Source(name=str(path), num_bytes=num_bytes, sha256=sha256, path=path)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line number from 1, text without line end); offsets in errors count bytes from 0."""
    offset_bytes = 0
    try:
        with path.open("rb") as handle:
            for number, raw in enumerate(handle, start=1):
                if (nul := raw.find(b"\0")) >= 0:
                    raise CorpusError(
                        f"--input {path}: expected text, found binary data (a NUL byte at byte offset {offset_bytes + nul})"
                    )
                try:
                    line = raw.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise CorpusError(
                        f"--input {path}: expected UTF-8 text, found byte 0x{raw[error.start]:02x} at byte offset "
                        f"{offset_bytes + error.start}"
                    ) from error
                offset_bytes += len(raw)
                # Editors on Windows put a byte order mark first; json refuses it, and it is no text.
                yield number, (line.removeprefix("\ufeff") if number == 1 else line).rstrip("\r\n")
    except OSError as error:
        raise _unreadable(path, error) from error


def _paragraphs(path: Path) -> Iterator[str]:
    block: list[str] = []
    for _, line in _lines(path):
        if line.strip():
            block.append(line)
        elif block:
            yield "\n".join(block)
            block = []
    if block:
        yield "\n".join(block)


def _json_texts(path: Path, key: str) -> Iterator[str]:
    for number, line in _lines(path):
        if line.strip():
            yield _json_text(f"--input {path}, line {number}", line, key)


def _json_text(place: str, line: str, key: str) -> str:
    """Return the string under `key`; `place` opens the error message."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise CorpusError(
            f"{place}: expected one JSON object, found broken JSON ({error.msg}, column {error.colno})"
        ) from error
    except (ValueError, RecursionError) as error:
        # Valid JSON that Python declines: numbers of thousands of digits, nesting deeper than its stack.
        raise CorpusError(f"{place}: expected one JSON object, found one too large to read ({error})") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{place}: expected a JSON object, found {type(record).__name__}")
    if key not in record:
        shown = ", ".join(repr(name) for name in list(record)[:_MAX_KEYS_SHOWN]) or "no keys"
        more = ", ..." if len(record) > _MAX_KEYS_SHOWN else ""
        raise CorpusError(f"{place}: expected the key {key!r} (--json-key), found {shown}{more}")
    text = record[key]
    if not isinstance(text, str):
        raise CorpusError(f"{place}: expected a string under {key!r}, found {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # JSON can spell half of a surrogate pair, which is not a character and which no tokenizer accepts.
        raise CorpusError(f"{place}: expected Unicode text, found a lone surrogate {text[error.start]!r}") from error
    return text


def _unreadable(path: Path, error: OSError) -> CorpusError:
    return CorpusError(f"--input {path}: expected a readable file, found: {error.strerror or error}")
