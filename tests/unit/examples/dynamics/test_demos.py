"""The examples: flags that the parser and the families accept, a table and a picture of a made-up run."""

import argparse
import importlib
import io
from types import SimpleNamespace

import freezing
import moe
import pruning
import pytest
from demo import sum_up
from picture import write_picture
from rich.console import Console
from story import read_story

from megatron_dyn.args import add_dyn_args
from tests.unit.examples.dynamics.runs import write_run

DEMOS = [freezing.DEMO, pruning.DEMO, moe.DEMO]


@pytest.mark.parametrize("num_steps", [6, 60, 1000])
@pytest.mark.parametrize("demo", DEMOS, ids=lambda demo: demo.name)
def test_flags_switch_the_family_on_for_any_number_of_steps(demo, num_steps):
    parser = add_dyn_args(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False))
    args = parser.parse_args(demo.family_flags(num_steps))
    assert importlib.import_module(f"megatron_dyn.dynamics.{demo.name}.flags").is_on(args)


def test_a_run_is_summed_up(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    sum_up(read_story(*write_run(tmp_path)), console)
    text = console.file.getvalue()
    assert "layers 0-1 frozen" in text
    assert "the move after step 6: 0.400 s to 0.300 s a step, 1.33 times as fast; it took 0.50 s" in text
    assert "loss 5.900 to 4.800 in 12 steps" in text


def test_a_run_without_a_move_says_why(tmp_path):
    console = Console(file=io.StringIO(), width=120)
    report, log = write_run(tmp_path)
    rounds = (report / "rounds.jsonl").read_text().replace('"commit"', '"no_change"')
    (report / "rounds.jsonl").write_text(rounds)
    sum_up(read_story(report, log), console)
    assert "no move was made; the reasons:\n  pays" in console.file.getvalue()


def test_a_run_is_drawn_the_same_each_time(tmp_path):
    story = read_story(*write_run(tmp_path))
    for name in ("one.svg", "two.svg"):
        write_picture(story, tmp_path / name, "a title")
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert all(words in text for words in ("a title", "stage 1", "layers moved", "the model changed"))


def test_facts_of_a_family_are_told():
    console = Console(file=io.StringIO(), width=120)
    layers = [{"layer": 4, "max_over_mean": 1.5}, {"layer": 5, "max_over_mean": 2.25}]
    moe.show_loads(SimpleNamespace(changes=[{"family": "moe", "iteration": 10, "layers": layers}]), console)
    moe.show_loads(SimpleNamespace(changes=[]), console)
    level = {"family": "prune", "iteration": 20, "level": 0.5, "kernels": {"forward": {"compact": 32}}}
    pruning.show_kernels(SimpleNamespace(changes=[level]), console)
    assert all(word in console.file.getvalue() for word in ("layer 5", "2.25", "compact 32", "50.0%", "dense"))
