"""Runs the command in this process, as `megatron-dyn` would."""

import json

import pytest

from megatron_dyn.cli.main import main


class Ran:
    """What a command left behind."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def command(capsys):
    """Run `megatron-dyn` with these words; argparse's exits are exit codes as well."""

    def run(*words):
        capsys.readouterr()
        try:
            code = main([str(word) for word in words])
        except SystemExit as exit:
            code = exit.code
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


@pytest.fixture
def timing(tmp_path):
    """Write a timing file and give its path."""

    def write(content, name="timing.json"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write
