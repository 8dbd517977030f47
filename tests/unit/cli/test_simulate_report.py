"""Tables and JSON of `simulate`, as its user sees them."""

import json

SKEW = ("simulate", "--kind", "stationary-skew", "--layers", "16", "--pp", "4")


def cells_of(out):
    """The rows of all tables, without the lines that a folded cell goes on in."""
    rows = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in out.splitlines() if line.startswith("\u2502")]
    return [row for row in rows if row[0]]


def test_all_rounds_of_a_short_run_are_shown(command):
    ran = command(*SKEW, "--steps", "100")
    rounds = command(*SKEW, "--steps", "100", "--json").json["rounds"]
    rows = cells_of(ran.out)
    words = {"commit": "move", "no_change": "stay"}
    assert [row[:3] for row in rows[:-4]] == [[str(item["step"]), words[item["outcome"]], item["layout"]] for item in rounds]
    assert [row[0] for row in rows[-4:]] == [
        "first layout throughout",
        "with the rounds above",
        "best layout tried, throughout",
        "best layout at every step, moves free",
    ]
    assert "more rounds moved nothing" not in ran.out


def test_of_a_long_run_only_the_moves_are_shown(command):
    words = (*SKEW, "--steps", "600", "--profile-interval", "2", "--profile-window", "5")
    rounds = command(*words, "--json").json["rounds"]
    ran = command(*words)
    assert len(rounds) > 40
    assert [row[1] for row in cells_of(ran.out)[:-4]] == ["move"]
    assert f"{len(rounds) - 1} more rounds moved nothing (--json lists them)" in ran.out


def test_nothing_to_show_is_no_empty_table(command):
    ran = command(*SKEW, "--steps", "3")
    assert "after step" not in ran.out
    assert "stationary-skew: 16 layers, 3 steps of 32 micro-batches" in ran.out


def test_a_freeze_schedule_says_what_its_steps_mean(command):
    words = ("simulate", "--freeze-schedule", '{"0-7": [0, 20], "8": [10, -1]}', "--layers", "24", "--pp", "4")
    ran = command(*words)
    for what in (
        "freeze 0-7",
        "train 0-7",
        "0-8",
        "start at Et*",
        "none: built so",
        "ends are exclusive",
    ):
        assert what in ran.out
    assert [item["step"] for item in command(*words, "--json").json["changes"]] == [0, 10, 20]


def test_a_resize_says_who_goes_and_what_travels(command):
    words = ("simulate", "--resize", "[{step0,size8},{step9,size4},{step10,size0}]", "--sizes", "8->(4,1,2),4->(2,1,2)")
    ran = command(*words, "--layers", "8", "--global-batch", "64", "--micro-batch-size", "8", "--gpus-per-node", "2")
    assert cells_of(ran.out) == [
        ["0", "8", "4, 1, 2", "Et*2|t*2|t*2|t*2L", "0-7", "none", "none", "none", "none", "4 x 8 x dp 2"],
        ["9", "4", "2, 1, 2", "Et*4|t*4L", "0-3", "4-7", "2-3", "none", "2-7", "4 x 8 x dp 2"],
        ["10", "0", "stop", "", "none", "0-3", "0-1", "none", "none", ""],
    ]


def test_json_is_alone_on_stdout(command):
    ran = command(*SKEW, "--steps", "30", "--json")
    assert json.loads(ran.out)["num_steps"] == 30
    assert ran.err == ""
