"""What the quickstart's corpus says to wrong input: exit code 2, one line that names it, and no file left or lost."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import corpus
import pytest
from corpus import CorpusError, build_corpus, main

TEXT = "The layers stay in order.\nThe losses stay equal.\n\nNo layer is lost, no layer is doubled.\n"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text(TEXT)
    return path


def refused(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Run the command line, which must refuse; return its one line."""
    try:
        code: object = main(arguments)
    except SystemExit as leave:  # argparse leaves by itself
        code = leave.code
    shown = capfd.readouterr()
    assert (code, shown.out) == (2, "")
    assert shown.err.startswith("corpus.py: error: ") and shown.err.count("\n") == 1
    return shown.err


def check_refused(path: Path, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The input `path` is refused with `expected` in the message, and no output folder appears."""
    out = path.parent / "new" / "out"
    message = refused(["--input", str(path), "--vocab-size", "300", "--out", str(out)], capfd)
    assert f"--input {path}" in message and expected in message
    assert not out.parent.exists()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected text, found an empty file (0 bytes)"),
        (b" \n\t\n\n", "expected text, found only blank space"),
        (b"some text\n\x7fELF\x00\x01", "found binary data (a NUL byte at byte offset 14)"),
        ("two bytes each".encode("utf-16"), "found binary data (a NUL byte at byte offset 3)"),
        (b"caf\xc3\xa9\ncaf\xe9\n", "expected UTF-8 text, found byte 0xe9 at byte offset 9"),
        (b"cut in a character \xe2\x82", "expected UTF-8 text, found byte 0xe2 at byte offset 19"),
    ],
)
def test_text_that_is_none(tmp_path: Path, capfd: pytest.CaptureFixture[str], content: bytes, expected: str) -> None:
    (tmp_path / "in.txt").write_bytes(content)
    check_refused(tmp_path / "in.txt", expected, capfd)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"text": "cut', "line 3: expected one JSON object, found broken JSON (Unterminated string"),
        ("{", "line 3: expected one JSON object, found broken JSON"),
        ("just words", "line 3: expected one JSON object, found broken JSON (Expecting value, column 1)"),
        ('["text"]', "line 3: expected a JSON object, found list"),
        ("[" * 200_000, "line 3: expected one JSON object, found one too large to read"),
        ('{"id": ' + "1" * 5000 + "}", "line 3: expected one JSON object, found one too large to read"),
        ('{"body": "x", "id": 1}', "line 3: expected the key 'text' (--json-key), found 'body', 'id'"),
        ("{}", "line 3: expected the key 'text' (--json-key), found no keys"),
        (json.dumps(dict.fromkeys("abcdefg")), "found 'a', 'b', 'c', 'd', 'e', ..."),
        ('{"text": null}', "line 3: expected a string under 'text', found NoneType"),
        ('{"text": "\\ud800"}', "line 3: expected Unicode text, found a lone surrogate '\\ud800'"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".JSON"])
def test_json_lines_that_are_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], suffix: str, line: str, expected: str
) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    check_refused(path, expected, capfd)


def test_inputs_that_are_no_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    check_refused(tmp_path / "absent.txt", "expected a text or JSONL file, found nothing there", capfd)
    (tmp_path / "folder").mkdir()
    check_refused(tmp_path / "folder", "expected a regular file, found a directory", capfd)


def test_an_input_that_cannot_be_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = Path("/proc/self/mem")  # opens, but has nothing at its first byte: an error even for root
    message = refused(["--input", str(path), "--out", str(tmp_path / "out")], capfd)
    assert message.endswith("--input /proc/self/mem: expected a readable file, found: Input/output error\n")


def test_an_input_that_changes_meanwhile(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = corpus.train_tokenizer

    def grow(*arguments: object) -> bytes:
        text.write_text(TEXT + "More.\n")
        return train(*arguments)

    monkeypatch.setattr(corpus, "train_tokenizer", grow)
    with pytest.raises(CorpusError, match="changed while being read"):
        build_corpus([text], tmp_path / "out", 290)
    assert not (tmp_path / "out").exists()


def test_a_python_without_its_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "found none; pass --input FILE" in refused(["--out", str(tmp_path / "out")], capfd)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--vocab-size", "0"], "--vocab-size: expected a number from 1 to 2147483647, found 0"),
        (["--vocab-size", "-5"], "--vocab-size: expected a number from 1 to 2147483647, found -5"),
        (["--vocab-size", str(2**31)], "--vocab-size: expected a number from 1 to 2147483647, found 2147483648"),
        (["--vocab-size", "many"], "argument --vocab-size: invalid int value: 'many'"),
        (["--model-type", "word"], "argument --model-type: invalid choice: 'word'"),
        (["--input"], "argument --input: expected at least one argument"),
    ],
)
def test_wrong_flags(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], expected: str) -> None:
    assert expected in refused(["--input", str(text), "--out", str(tmp_path / "out"), *flags], capfd)
    assert not (tmp_path / "out").exists()


def test_no_output_folder_named(capfd: pytest.CaptureFixture[str]) -> None:
    assert "the following arguments are required: --out" in refused([], capfd)


def test_a_model_type_that_does_not_exist(text: Path, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="--model-type: expected one of bpe, unigram, found word"):
        build_corpus([text], tmp_path / "out", 290, model_type="word")


def test_text_the_trainer_refuses(text: Path, tmp_path: Path) -> None:
    text.write_text("\u2585\n")  # SentencePiece keeps this character for itself
    with pytest.raises(CorpusError, match="expected text that a tokenizer can be trained on, .* INTERNAL"):
        build_corpus([text], tmp_path / "out", 290)


@pytest.mark.parametrize("model_type", corpus.MODEL_TYPES)
@pytest.mark.parametrize(("asked", "bound", "beyond"), [(8000, "most", 1), (100, "least", -1)])
def test_the_limits_of_the_vocabulary_are_told_and_true(
    text: Path, tmp_path: Path, model_type: str, asked: int, bound: str, beyond: int
) -> None:
    with pytest.raises(CorpusError) as caught:
        build_corpus([text], tmp_path / "out", asked, model_type=model_type)
    told = re.search(rf"--vocab-size: expected at {bound} (\d+) for this text.*, found {asked}$", str(caught.value))
    assert told is not None
    limit = int(told[1])
    with pytest.raises(CorpusError, match=f"expected at {bound} {limit} "):
        build_corpus([text], tmp_path / "out", limit + beyond, model_type=model_type)
    assert not (tmp_path / "out").exists()
    assert build_corpus([text], tmp_path / "out", limit, model_type=model_type).vocab_size == limit


def test_an_output_folder_that_cannot_be_made(text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for out, found in ((text, "File exists"), (text / "below", "Not a directory")):
        message = refused(["--input", str(text), "--vocab-size", "290", "--out", str(out)], capfd)
        assert f"--out {out}: expected a folder to write to, found: {found}" in message
    assert text.read_text() == TEXT


@contextmanager
def files_limited_to(num_bytes: int) -> Iterator[None]:
    """Stand in for a full disk: writing past `num_bytes` of any file fails inside the block.

    Not a fixture: pytest writes its dot before it tears fixtures down, and its output may be a file as well.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("num_bytes", [100, 8000])
def test_a_full_disk_leaves_the_older_corpus_whole(text: Path, tmp_path: Path, num_bytes: int) -> None:
    out = tmp_path / "out"
    build_corpus([text], out, 290)
    before = {path: path.read_bytes() for path in out.iterdir()}
    text.write_text(TEXT * 200)
    # The model has about 5 kB, the tokens more than 8: first one write fails, then the other.
    full = f"--out {out}: expected a folder to write to, found: File too large"
    with pytest.raises(CorpusError, match=full), files_limited_to(num_bytes):
        build_corpus([text], out, 290)
    assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_the_script_itself_exits_with_2(tmp_path: Path) -> None:
    script = Path(corpus.__file__)
    run = subprocess.run(
        [sys.executable, str(script), "--input", "absent.txt", "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert (
        run.stderr == f"corpus.py: error: --input {tmp_path}/absent.txt: expected a text or JSONL file, found nothing there\n"
    )
