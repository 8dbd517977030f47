"""Environment and threads of a rank."""

import os
from contextlib import ExitStack

import torch

from megatron_dyn.host.cpu.bootstrap import limit_threads, rank_environment, set_environment


def test_a_launched_rank_keeps_its_environment():
    assert rank_environment({"RANK": "3"}) == {}


def test_a_rank_alone_becomes_rank_zero_of_one():
    alone = rank_environment({}, port=lambda: 1234)
    assert alone == {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1234",
    }


def test_left_over_sizes_of_an_enclosing_job_do_not_count():
    assert rank_environment({"WORLD_SIZE": "8", "MASTER_ADDR": "node7"}, port=lambda: 1)["WORLD_SIZE"] == "1"


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("DYN_TEST_KEPT", "before")
    monkeypatch.delenv("DYN_TEST_NEW", raising=False)
    with ExitStack() as stack:
        set_environment({"DYN_TEST_KEPT": "during", "DYN_TEST_NEW": "during"}, stack)
        assert (os.environ["DYN_TEST_KEPT"], os.environ["DYN_TEST_NEW"]) == ("during", "during")
    assert os.environ["DYN_TEST_KEPT"] == "before"
    assert "DYN_TEST_NEW" not in os.environ


def test_one_thread_unless_the_user_says_otherwise():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with ExitStack() as stack:
            limit_threads({"OMP_NUM_THREADS": "2"}, stack)
            assert torch.get_num_threads() == 2
            limit_threads({}, stack)
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
