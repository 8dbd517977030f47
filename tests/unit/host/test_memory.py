"""Peak memory: what a stretch of work needs beyond what was there, although it is given back before anybody looks."""

import numpy as np
import pytest
import torch

from megatron_dyn.host import memory
from megatron_dyn.host.memory import PeakMemory

SIZE = 64 * 2**20


@pytest.fixture
def peak():
    return PeakMemory(torch.device("cpu"))


def touch(num_bytes):
    """Allocate so much, and use it: memory that nobody wrote to is not resident."""
    np.ones(num_bytes, dtype=np.uint8)


def test_what_is_given_back_before_the_end_counts(peak):
    peak.start()
    touch(SIZE)
    # The allocator may have some pages left from before.
    assert 0.9 * SIZE < peak.stop() < 2 * SIZE


def test_what_was_needed_before_the_start_does_not(peak):
    touch(SIZE)
    peak.start()
    assert peak.stop() < SIZE // 4


def test_where_it_cannot_be_seen_it_is_not_known(peak, monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "missing" / "clear_refs")
    peak.start()
    assert peak.stop() is None
