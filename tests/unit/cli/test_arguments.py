"""Command-line values: what is a number, and what argparse says when it is none."""

import argparse

import pytest

from megatron_dyn.cli.arguments import count, fraction, positive_int, positive_number, up_to


@pytest.mark.parametrize(
    ("convert", "text", "value"),
    [
        (positive_int, "12", 12),
        (up_to(12), "12", 12),
        (count, "0", 0),
        (fraction, "0.03", 0.03),
        (fraction, "0", 0.0),
        (positive_number, "0.5", 0.5),
        (positive_number, "1e3", 1000.0),
    ],
)
def test_numbers_are_read(convert, text, value):
    assert convert(text) == value


@pytest.mark.parametrize(
    ("convert", "text"),
    [
        *((positive_int, text) for text in ("0", "-1", "1.5", "", "x", "1" * 10, "\u0661")),
        *((up_to(12), text) for text in ("0", "13", "x", "9" * 5000)),
        *((count, text) for text in ("-1", "x", "1e3")),
        *((fraction, text) for text in ("1", "-0.1", "nan", "x")),
        *((positive_number, text) for text in ("0", "-1", "nan", "inf", "x", "")),
    ],
)
def test_others_are_refused_with_what_was_given(convert, text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a") as error:
        convert(text)
    assert repr(text) in str(error.value)
