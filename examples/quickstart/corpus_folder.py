"""The output folder of a corpus: all of it or nothing, and recognised when it is asked for again.

A corpus is written beside its destination and renamed into place; `corpus.json` goes last and vouches for the other
files with their digests. Used by `corpus.py`; knows neither text, tokens nor the command line.
"""

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from corpus_text import CorpusError

PREFIX_NAME = "corpus_text_document"
TOKENIZER_NAME = "tokenizer.model"
PROVENANCE_NAME = "corpus.json"
_DATA_NAMES = (f"{PREFIX_NAME}.bin", f"{PREFIX_NAME}.idx", TOKENIZER_NAME)


def find(out_dir: Path, request: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the facts of the corpus in `out_dir` if it was made for an equal `request` and is undamaged."""
    try:
        facts: dict[str, Any] = json.loads((out_dir / PROVENANCE_NAME).read_bytes())
        if facts["request"] == request and facts["files"] == {name: _digest(out_dir / name) for name in _DATA_NAMES}:
            return facts
    except (OSError, ValueError, KeyError, TypeError):
        # No corpus, or one damaged in whatever way: it is made anew.
        return None
    return None


@contextlib.contextmanager
def staging(out_dir: Path) -> Iterator[Path]:
    """Lend an empty folder inside `out_dir`; remove it at the end, and `out_dir` too where nothing was committed.

    Raises CorpusError for any OSError of the body: those of the inputs are CorpusErrors by then, so the rest is about
    writing.
    """
    created = [parent for parent in (out_dir, *out_dir.parents) if not parent.exists()]
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        # Inside the destination, since a rename is atomic only within one file system.
        with tempfile.TemporaryDirectory(prefix=".corpus-", dir=out_dir) as folder:
            yield Path(folder)
    except OSError as error:
        raise CorpusError(f"--out {out_dir}: expected a folder to write to, found: {error.strerror or error}") from error
    finally:
        for parent in created:
            # Fails where something was committed, as it should.
            with contextlib.suppress(OSError):
                parent.rmdir()


def commit(folder: Path, out_dir: Path, request: Mapping[str, Any], counts: Mapping[str, Any]) -> dict[str, Any]:
    """Move the files of the staging `folder` to `out_dir`; return the facts that `find` will return later."""
    facts = {"request": request, **counts, "files": {name: _digest(folder / name) for name in _DATA_NAMES}}
    (folder / PROVENANCE_NAME).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    # Gone during the renames: a crash between two of them must not leave a mixture that is vouched for.
    (out_dir / PROVENANCE_NAME).unlink(missing_ok=True)
    _drop_stale_indices(out_dir)
    for name in (*_DATA_NAMES, PROVENANCE_NAME):
        os.replace(folder / name, out_dir / name)
    return facts


def _digest(path: Path) -> dict[str, int | str]:
    with path.open("rb") as handle:
        sha256 = hashlib.file_digest(handle, "sha256").hexdigest()
        return {"num_bytes": handle.tell(), "sha256": sha256}


def _drop_stale_indices(out_dir: Path) -> None:
    """Remove the sample indices that Megatron caches in a folder named as the dataset.

    It finds them by the path of the dataset, not by its content: indices of an older corpus in the same place would
    silently give wrong samples, or reach past the end of the new one.
    """
    indices = out_dir / PREFIX_NAME / "cache" / "GPTDataset_indices"
    if indices.is_dir():
        shutil.rmtree(indices)
