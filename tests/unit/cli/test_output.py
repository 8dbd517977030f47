"""Tables, spans and files: what is written is what was given, at any width."""

import json

import pytest

from megatron_dyn.cli.errors import InputError
from megatron_dyn.cli.output import console, countdown, progress, say, spans, table, warn, write_file, write_json


@pytest.mark.parametrize(("layers", "text"), [((), "none"), ((4,), "4"), ((0, 1, 2), "0-2"), ((0, 1, 5, 8, 9), "0-1, 5, 8-9")])
def test_layer_ids_are_written_as_runs(layers, text):
    assert spans(layers) == text


def test_long_lines_are_not_folded_and_brackets_are_no_markup(capsys):
    line = "layout: [bold]x[/bold] " + "|t" * 200
    say(line)
    assert capsys.readouterr().out == line + "\n"


def test_a_table_shows_its_cells_as_they_are(capsys):
    console().print(table("title", ("a", "b"), [("1", "[red]x")], left=("b",)))
    out = capsys.readouterr().out
    assert "title" in out
    assert "[red]x" in out


def test_json_is_alone_on_stdout_and_has_no_nan(capsys):
    write_json({"a": 1})
    assert json.loads(capsys.readouterr().out) == {"a": 1}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json({"a": float("nan")})


def test_notes_go_to_stderr(capsys):
    warn("one", "two")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "megatron-dyn: note: one\nmegatron-dyn: note: two\n")


def test_progress_is_silent_where_nobody_sees_it(capsys):
    with progress(2, "working") as begin:
        for name in ("a", "b", "one more than said"):
            begin(name)
    with countdown(2, "working") as advance:
        advance()
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_a_file_that_cannot_be_written_is_named_with_its_flag(tmp_path):
    path = tmp_path / "missing" / "file"
    with pytest.raises(InputError, match=f"--trace {path}: cannot be written: No such file"):
        write_file("--trace", str(path), "")
