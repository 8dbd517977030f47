"""The launcher brings back results, output and failures, and never hangs."""

import os
import subprocess
import sys
import time

import pytest
import torch

from megatron_dyn.testing import ranks
from megatron_dyn.testing.ranks import RankFailure, run_ranks


@pytest.fixture(autouse=True)
def short_grace(monkeypatch):
    monkeypatch.setattr(ranks, "GRACE_SECONDS", 0.5)


def environment_of_a_rank(name):
    return os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], os.environ.get(name), os.getcwd()


def sum_over_ranks():
    torch.distributed.init_process_group("gloo")
    total = torch.ones(1) * (int(os.environ["RANK"]) + 1)
    torch.distributed.all_reduce(total)
    torch.distributed.destroy_process_group()
    return total.item()


def rank_one_raises():
    os.write(1, b"written below Python\n")
    if os.environ["RANK"] == "1":
        raise ValueError("layer 7 is not here")
    time.sleep(600)


def rank_one_vanishes():
    sys.stdout.write("before the end\n")
    sys.stdout.flush()
    if os.environ["RANK"] == "1":
        os._exit(17)
    torch.distributed.init_process_group("gloo")


def leaves_its_own_way():
    sys.stderr.write(f"rank {os.environ['RANK']} says goodbye\n")
    sys.exit(int(os.environ["RANK"]) * 3)


def sleeps_forever():
    time.sleep(600)


def cannot_be_pickled():
    return lambda: None


def leaves_a_process_behind():
    return subprocess.Popen(["sleep", "600"]).pid


def test_values_come_back_by_rank(tmp_path):
    found = run_ranks(environment_of_a_rank, 3, "DYN_TEST", cwd=tmp_path, environment={"DYN_TEST": "yes"})
    assert found == [(str(rank), str(rank), "3", "yes", str(tmp_path)) for rank in range(3)]


def test_ranks_reach_one_another():
    assert run_ranks(sum_over_ranks, 3) == [6.0, 6.0, 6.0]


def test_a_failed_rank_is_named_with_its_traceback_and_output_and_the_others_are_ended():
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed with exit code 1.*written below Python.*layer 7") as failure:
        run_ranks(rank_one_raises, 2)
    assert failure.value.rank == 1
    assert [result.exitcode for result in failure.value.results] == [-9, 1]


def test_a_rank_that_dies_without_a_word_is_the_cause():
    with pytest.raises(RankFailure, match=r"(?s)rank 1 failed with exit code 17.*before the end"):
        run_ranks(rank_one_vanishes, 2)


def test_exits_can_be_expected():
    results = run_ranks(leaves_its_own_way, 3, expect_exit=True)
    assert [result.exitcode for result in results] == [0, 3, 6]
    assert [result.output for result in results] == [f"rank {rank} says goodbye\n" for rank in range(3)]


@pytest.mark.parametrize("expect_exit", [False, True])
def test_a_rank_that_hangs_is_ended_and_told(expect_exit):
    with pytest.raises(RankFailure, match=r"did not end within 1.0 s \(ranks still running: \[0, 1\]\)"):
        run_ranks(sleeps_forever, 2, timeout_seconds=1.0, expect_exit=expect_exit)


def test_a_value_that_cannot_travel_is_a_failure():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(cannot_be_pickled, 1)


def test_nothing_a_rank_started_outlives_it():
    (pid,) = run_ranks(leaves_a_process_behind, 1)
    deadline = time.monotonic() + 10
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(pid)


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
