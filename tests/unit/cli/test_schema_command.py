"""The printed schema is the packaged one, and judges a file as the command does."""

import jsonschema
import pytest

from megatron_dyn.cli.timing_schema import schema_text
from megatron_dyn.cli.trace_file import trace_schema_text


def test_it_is_a_schema_that_other_tools_can_use(command):
    schema = command("schema").json
    jsonschema.validate({"layers": [1, 2]}, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"layers": [1, -2]}, schema)


def test_that_of_trace_files_is_printed_too(command):
    assert command("schema", "trace").out == trace_schema_text()
    assert command("schema", "timing").out == command("schema").out == schema_text()
    assert command("schema", "rounds").code == 2
