"""The pages on the command say what it does: examples are run, example files are read, flags and fields exist.

Collaborators: source_tree. An example shows the output as far as it matters; `...` stands for any text.
"""

import doctest
import json
import re
import shlex

import jsonschema
import pytest

from megatron_dyn.cli.main import build_parser, main
from megatron_dyn.cli.timing_file import read_timing
from megatron_dyn.cli.timing_schema import schema_text
from tests.contract.source_tree import ROOT

COMMAND = (ROOT / "docs/command.md").read_text()
TIMING_FILES = (ROOT / "docs/timing-files.md").read_text()
NAMED_FILE = re.compile(r"`([\w.-]+)`:\n\n```\w+\n(.*?)```", re.DOTALL)
CHECKER = doctest.OutputChecker()


def examples(page):
    """(Words after `megatron-dyn`, expected output) of every `$` line in a console block, in order."""
    for block in re.findall(r"```console\n(.*?)```", page, re.DOTALL):
        for example in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, _, expected = example.partition("\n")
            yield shlex.split(line)[1:], expected


def differs(expected, actual):
    """Whether an output is not the one that was shown."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    return not CHECKER.check_output(expected, actual, flags)


@pytest.mark.parametrize(("words", "expected"), list(examples(COMMAND)), ids=lambda value: " ".join(value)[:60])
def test_examples_give_what_they_show(words, expected, tmp_path, monkeypatch, capsys):
    for name, content in NAMED_FILE.findall(COMMAND):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    main(words)
    captured = capsys.readouterr()
    assert not differs(expected, captured.out + captured.err), captured.out + captured.err


def test_the_check_of_an_example_can_fail():
    words, expected = next(examples("```console\n$ megatron-dyn layout EtL\nlayout: EtL\n...\n```"))
    assert words == ["layout", "EtL"]
    assert not differs(expected, "layout: EtL\nmore\n")
    assert differs(expected, "layout: EttL\nmore\n")


def test_example_files_are_good_and_the_published_schema_agrees(tmp_path):
    blocks = re.findall(r"```(json|csv)\n(.*?)```", TIMING_FILES, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"json", "csv"}
    for kind, content in blocks:
        path = tmp_path / f"example.{kind}"
        path.write_text(content)
        assert read_timing(str(path)).layers
        if kind == "json":
            jsonschema.validate(json.loads(content), json.loads(schema_text()))


def test_flags_and_commands_of_the_pages_exist():
    subcommands = next(
        action.choices
        for action in build_parser()._actions
        if action.dest == "COMMAND" or action.choices and "plan" in action.choices
    )
    known = {flag for parser in subcommands.values() for action in parser._actions for flag in action.option_strings}
    table = re.findall(r"^\| `(--[a-z-]+)", COMMAND, re.MULTILINE)
    assert table
    assert set(table) <= known
    commands = re.findall(r"^\| `([a-z]+)[ `]", COMMAND, re.MULTILINE)
    assert set(subcommands) <= set(commands)
