"""The planner's benchmark measures what it says: on few problems, its gaps, its limit and its way to DeepSpeed's functions."""

import sys

import pytest

from benchmarks.deepspeed_worker import partition_balanced
from benchmarks.planner import ask_deepspeed, score, score_sizes, score_traces
from benchmarks.planner_cases import FAMILIES, TRACE_STEPS, random_problems, trace, without_ends
from megatron_dyn.plan.algorithms import ALGORITHMS

# The least that looks like a release: the functions are taken out of the file, the file itself is not run.
RELEASE = """
raise ImportError("the torch of today is not that of 2023")
def prefix_sum_inc(weights):
    return weights
def partition_balanced(weights, num_parts):
    assert num_parts != 3
    return [0, len(prefix_sum_inc(weights))]
"""


def test_gaps_are_to_the_exact_answer():
    problems = list(random_problems(10))
    scores = score(problems)
    assert list(scores) == list(ALGORITHMS)
    assert scores["exact"].gaps == [0.0] * 10
    assert all(gap >= 0.0 for name in ("partition", "diffusion", "deepspeed-balanced") for gap in scores[name].gaps)
    assert max(scores["diffusion"].gaps) > 0.0
    assert all(problem.last_seconds == 0.0 for problem in without_ends(problems))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trace_changes_costs_only_and_is_the_same_each_time(family):
    steps = list(trace(family, 8, 4))
    assert steps == list(trace(family, 8, 4))
    assert 1 <= len({step.layer_seconds for step in steps}) == len(steps) <= TRACE_STEPS
    assert (len(steps) == 1) == (family == "mixture-of-depths")
    assert {(step.last_seconds, step.layer_parameters) for step in steps} == {
        (steps[0].last_seconds, steps[0].layer_parameters)
    }
    assert score_traces(family, [(8, 4)])["exact"].gaps == [0.0] * len(steps)


def test_no_size_is_tried_that_would_take_too_long():
    rows = score_sizes([(8, 2), (16, 4)], limit_seconds=0.0)
    assert all(found[0] is not None for found in rows.values())
    assert rows["partition"][1] is None
    assert all(None not in found for found in score_sizes([(8, 2), (16, 4)]).values())


def test_a_release_of_deepspeed_is_asked_in_its_own_interpreter(tmp_path, monkeypatch):
    (tmp_path / "deepspeed" / "runtime").mkdir(parents=True)
    (tmp_path / "deepspeed" / "__init__.py").touch()
    (tmp_path / "deepspeed" / "runtime" / "utils.py").write_text(RELEASE)
    (tmp_path / "deepspeed-0.0.1.dist-info").mkdir()
    (tmp_path / "deepspeed-0.0.1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    answer = ask_deepspeed(sys.executable, [([1.0, 2.0], 1), ([1.0], 3)])
    assert (answer["version"], answer["is_old"]) == ("0.0.1", False)
    assert [found for found, _ in answer["answers"]] == [[0, 2], "AssertionError"]


def test_without_deepspeed_that_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="deepspeed: expected to be installed"):
        partition_balanced()
