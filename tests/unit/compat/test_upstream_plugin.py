"""What the pytest plugin puts into Megatron's test run, in a rank: it changes the process it runs in."""

import os
import sys

from compat.upstream_plugin import put_in
from megatron_dyn.host.ledger import ledger
from megatron_dyn.host.seams import is_applied
from megatron_dyn.testing.ranks import run_ranks


def rows_in_force(mode):
    """Targets of the rows in force, how many are left afterwards, and whether the process is as it was."""
    before = dict(os.environ), list(sys.argv)
    in_force = put_in(mode)
    targets = [row.target for row in in_force.rows if is_applied(row)]
    unchanged = before == (dict(os.environ), list(sys.argv))
    in_force.stack.close()
    return targets, sum(is_applied(row) for row in in_force.rows), unchanged


def test_on_is_every_row_that_needs_no_running_job_and_no_missing_gpu():
    ((targets, left, unchanged),) = run_ranks(rows_in_force, 1, "on")
    # Layers that train outside of a schedule, as in Megatron's tests, are an error with streams of their own; the others
    # change what Megatron's tests of checkpoints and schedules look at.
    out = ("without a GPU", "with --dyn-rng-per-layer", "with --dyn-freeze", "while layers may differ")
    expected = {row.target for when, rows in ledger().items() if not any(word in when for word in out) for row in rows}
    assert set(targets) == expected
    assert (left, unchanged) == (0, True)


def test_off_is_none():
    assert run_ranks(rows_in_force, 1, "off") == [([], 0, True)]
