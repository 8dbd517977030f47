"""Which Megatron-core the ranks of this run train with: the pinned one, or the one that `make test-compat` says."""

import os
import re
from pathlib import Path

import pytest

from megatron_dyn.host import compat
from megatron_dyn.testing.ranks import run_ranks

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


@pytest.mark.core_matrix
def test_the_ranks_import_the_release_that_this_run_is_about():
    """Without it a run on another release could pass with the usual one: both are on this machine."""
    pinned = re.search(r"^megatron-core==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE)
    expected = os.environ.get("MEGATRON_UNDER_TEST") or pinned[1]
    (found,) = run_ranks(compat.check_version, 1)
    # Behind the plus: the commit of whatever repository the package lies in, here of ours.
    assert found.partition("+")[0] == expected
