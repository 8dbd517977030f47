"""How a rank ends a job that cannot go on: at once, with one line, and with nothing of it left behind."""

import multiprocessing
import os
import select
import time

from megatron_dyn.host.driver import _end_the_job
from megatron_dyn.ports import JobError


def end_with_a_child():
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True).start()
    _end_the_job(JobError("planned"))


def test_the_children_of_a_rank_end_with_it():
    read, write = os.pipe()
    rank = os.fork()
    if rank == 0:
        os.close(read)
        end_with_a_child()
    os.close(write)
    assert os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) == 1
    # The pipe ends once nobody holds its other end any more.
    assert select.select([read], [], [], 10)[0] == [read]
    os.close(read)
