"""Patterns as text, what they can prune at most, and the shapes they cannot cut."""

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.pruning.pattern import Kind, Pattern


@pytest.mark.parametrize(
    ("text", "kind", "highest"),
    [
        ("unstructured", Kind.UNSTRUCTURED, 1.0),
        ("rows", Kind.ROWS, 1.0),
        ("2:4", Kind.N_OF_M, 0.5),
        ("1:8", Kind.N_OF_M, 0.875),
        ("block:16x32", Kind.BLOCK, 1.0),
    ],
)
def test_text_goes_there_and_back(text, kind, highest):
    pattern = Pattern.parse(text)
    assert (pattern.kind, pattern.text, pattern.highest_level) == (kind, text, highest)


@pytest.mark.parametrize("text", ["", "4:4", "0:4", "5:4", "2:4:8", "2-4", "block", "block:0x4", "block:4", "block:4x", "row"])
def test_what_is_malformed_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--dyn-prune-pattern: expected unstructured, rows, N:M"):
        Pattern.parse(text)


def test_shapes_that_cannot_be_cut_are_told():
    assert Pattern.parse("2:4").objection((3, 8)) is None
    assert Pattern.parse("2:4").objection((4, 6)) == "6 inputs are no multiple of 4"
    assert Pattern.parse("block:2x4").objection((4, 8)) is None
    assert "blocks of 2x4" in Pattern.parse("block:2x4").objection((3, 8))
    assert "blocks of 2x4" in Pattern.parse("block:2x4").objection((4, 6))
    assert Pattern.parse("rows").objection((3, 5)) is None
