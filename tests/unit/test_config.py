"""Settings: what is read, what follows from it, and refusals that name their flag."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from megatron_dyn.config import (
    ConfigError,
    DecideConfig,
    DynConfig,
    ForcedLayout,
    MeasureConfig,
    RebalanceMode,
    RebalancePolicy,
)
from megatron_dyn.records import Layout

AUTO = RebalancePolicy(mode=RebalanceMode.AUTO)
FORCED = (ForcedLayout(iteration=3, text="Ett|ttL"),)
BUILT = Layout.contiguous([2, 2])


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("off", RebalancePolicy()),
        ("auto", AUTO),
        ("every:50", RebalancePolicy(mode=RebalanceMode.EVERY, every_steps=50)),
        ("at:1", RebalancePolicy(mode=RebalanceMode.AT, at_steps=(1,))),
        ("at:10,20,300", RebalancePolicy(mode=RebalanceMode.AT, at_steps=(10, 20, 300))),
    ],
)
def test_policies_are_read(text: str, policy: RebalancePolicy) -> None:
    """Every form; only `off` is inactive."""
    assert RebalancePolicy.parse(text) == policy
    assert policy.active == (text != "off")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected off, auto, every:N or at:N1,N2, got ''"),
        ("on", "got 'on'"),
        ("Auto", "got 'Auto'"),
        ("every", "got 'every'"),
        ("every:", "got 'every:'"),
        ("every:-5", "got 'every:-5'"),
        ("every:0", "expected every:N with N of at least 1, got 0"),
        ("at:", "got 'at:'"),
        ("at:1,,2", "got 'at:1,,2'"),
        ("at:5,5", "expected at: with ascending steps"),
        ("at:9,5", "expected at: with ascending steps"),
        ("at:0,5", "expected at: with ascending steps of at least 1"),
    ],
)
def test_other_policies_are_refused(text: str, message: str) -> None:
    """The flag, what was expected, what was found."""
    with pytest.raises(ConfigError) as caught:
        RebalancePolicy.parse(text)
    assert str(caught.value).startswith("--dyn-rebalance")
    assert message in str(caught.value)


def test_forced_layouts_are_read() -> None:
    """In order, with blanks around an item."""
    assert ForcedLayout.parse_all("3:Ett|ttL; 8:Et|tttL") == (*FORCED, ForcedLayout(iteration=8, text="Et|tttL"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected N:LAYOUT, got ''"),
        ("Ett|ttL", "got 'Ett|ttL'"),
        ("3:Ett|ttL;", "got ''"),
        ("3:", "got '3:'"),
        ("3:Et t|ttL", "got '3:Et t|ttL'"),
        ("-1:EtL", "got '-1:EtL'"),
        ("8:EtL;3:EtL", "expected ascending iterations, got [8, 3]"),
        ("3:EtL;3:EtL", "expected ascending iterations, got [3, 3]"),
    ],
)
def test_other_forced_layouts_are_refused(text: str, message: str) -> None:
    """The flag, what was expected, what was found."""
    with pytest.raises(ConfigError) as caught:
        ForcedLayout.parse_all(text)
    assert str(caught.value).startswith("--dyn-layout-at")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": MeasureConfig(interval_steps=0)}, "--dyn-profile-interval: expected at least 1, got 0"),
        ({"measure": MeasureConfig(window_samples=0)}, "--dyn-profile-window: expected at least 1, got 0"),
        ({"measure": MeasureConfig(warmup_steps=-1)}, "--dyn-profile-warmup: expected at least 0, got -1"),
        ({"decide": DecideConfig(cooldown_steps=-1)}, "--dyn-cooldown-steps: expected at least 0, got -1"),
        ({"decide": DecideConfig(horizon_steps=0)}, "--dyn-horizon-steps: expected at least 1, got 0"),
        ({"decide": DecideConfig(stage_memory_bytes=0)}, "--dyn-stage-memory-gib: expected at least 1, got 0"),
        ({"decide": DecideConfig(min_gain=-0.1)}, "--dyn-min-gain: expected a fraction in [0, 1), got -0.1"),
        ({"decide": DecideConfig(min_gain=1.0)}, "--dyn-min-gain: expected a fraction in [0, 1), got 1.0"),
        ({"decide": DecideConfig(min_gain=float("nan"))}, "--dyn-min-gain: expected a fraction in [0, 1), got nan"),
        ({"bucket_bytes": 0}, "--dyn-migrate-bucket-bytes: expected at least 1, got 0"),
        ({"timeout_seconds": 0.0}, "--dyn-timeout-seconds: expected a finite number above 0, got 0.0"),
        ({"timeout_seconds": float("nan")}, "--dyn-timeout-seconds: expected a finite number above 0, got nan"),
        ({"record_losses": True}, "--dyn-record-losses: needs --dyn-report-dir, which is not set"),
    ],
)
def test_values_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    """Once, when the config is made; the message is exactly this line."""
    with pytest.raises(ConfigError) as caught:
        DynConfig(**arguments)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("config", "moves_possible", "rebalances", "exact_norm", "active"),
    [
        (DynConfig(), False, False, False, False),
        (DynConfig(rebalance=AUTO), True, True, True, True),
        (DynConfig(layout_at=FORCED), True, False, True, True),
        (DynConfig(rebalance=AUTO, layout_at=FORCED), True, False, True, True),
        (DynConfig(rebalance=AUTO, exact_grad_norm=False), True, True, False, True),
        (DynConfig(exact_grad_norm=True), False, False, True, True),
        (DynConfig(rng_per_layer=True), False, False, False, True),
        (DynConfig(record_losses=True, report_dir="reports"), False, False, False, True),
        (DynConfig(report_dir="reports"), False, False, False, False),
    ],
)
def test_what_follows_from_the_settings(
    config: DynConfig, moves_possible: bool, rebalances: bool, exact_norm: bool, active: bool
) -> None:
    """Off means absent; a forced layout wins over rebalancing; the exact norm is on where moves can happen."""
    answers = (config.moves_possible, config.rebalances, config.uses_exact_grad_norm, config.active)
    assert answers == (moves_possible, rebalances, exact_norm, active)


def test_forced_layouts_become_layouts() -> None:
    """By iteration, checked against what Megatron builds."""
    config = DynConfig(layout_at=ForcedLayout.parse_all("3:Ett|ttL;8:Et*3|tL"))
    layouts = config.forced_layouts(built=BUILT)
    assert {iteration: layout.counts for iteration, layout in layouts.items()} == {3: (2, 2), 8: (3, 1)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ett|tL", "places 3 layers, the model has 4"),
        ("Etx|tL", "unknown letter 'x'"),
        ("Ett|t|tL", "3 stages cannot be spread over 2"),
        ("Et|t|t|tL", "expected 2 stages (2 pipeline stages of 1 chunks), got 4 in 'Et|t|t|tL'"),
        ("Et*4|L", "leaves stage 1 without a decoder layer; pass --dyn-allow-empty-stages"),
    ],
)
def test_forced_layouts_that_cannot_be_are_refused(text: str, message: str) -> None:
    """The flag with its iteration, and the layout's own line."""
    config = DynConfig(layout_at=(ForcedLayout(iteration=7, text=text),))
    with pytest.raises(ConfigError) as caught:
        config.forced_layouts(built=BUILT)
    assert str(caught.value).startswith("--dyn-layout-at 7: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("built", "text"),
    [
        ("Ett|tt|L", "Ett|ttL|"),
        ("Ett|ttL|", "Ett|tt|L"),
        ("|Ett|ttL", "Ett|t|tL"),
        ("Ett|t|tmL", "Ett|t|tL"),
        ("Ett|t|tL", "Ett|t|tmL"),
        ("Ett|t|tm*2L", "Ett|t|tmL"),
        ("Ett|tt|mL", "Ett|ttm|L"),
        ("Et*3|t*3|t*2L", "Et*4|t*4L|"),
        ("E|t|t|t|t|tL", "Et|t|t|t|tL|"),
    ],
)
def test_forced_layouts_that_move_an_end_are_refused_with_both_layouts(built: str, text: str) -> None:
    """Only decoder layers move: embedding, MTP and head stay where Megatron built them."""
    forced = (ForcedLayout(iteration=7, text=text),)
    config = DynConfig(layout_at=forced, decide=DecideConfig(allow_empty_stages=True))
    with pytest.raises(ConfigError) as caught:
        config.forced_layouts(built=Layout.parse(built, 3))
    assert str(caught.value).startswith("--dyn-layout-at 7: expected E, m and L on the stages of ")
    assert repr(Layout.parse(built, 3).text) in str(caught.value)
    assert f"got {Layout.parse(text, 3).text!r} (only decoder layers move)" in str(caught.value)


@pytest.mark.parametrize(("built", "text"), [("Ett|t|tm*2L", "Et|t|ttmmL"), ("Ett|tt|L", "Et|ttt|L"), ("|Ett|ttL", "|Et|tttL")])
def test_forced_layouts_that_keep_the_ends_of_an_uneven_job_are_taken(built: str, text: str) -> None:
    """Ends need not be where a plain job has them."""
    forced = (ForcedLayout(iteration=7, text=text),)
    config = DynConfig(layout_at=forced, decide=DecideConfig(allow_empty_stages=True))
    assert config.forced_layouts(built=Layout.parse(built, 3)) == {7: Layout.parse(text, 3)}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Et|t|t|t*3L", None),
        ("Et|tt|t|ttL", None),
        ("Et*3|t*3L", "expected 4 stages (2 pipeline stages of 2 chunks), got 2 in 'Et*3|t*3L'"),
        ("Et|t|t|t|t|tL", "expected 4 stages (2 pipeline stages of 2 chunks), got 6 in 'Et|t|t|t|t|tL'"),
    ],
)
def test_a_job_with_virtual_stages_takes_layouts_with_as_many_chunks_and_no_others(text: str, message: str | None) -> None:
    """How many chunks a rank has is fixed when Megatron builds the model."""
    config, built = DynConfig(layout_at=(ForcedLayout(iteration=7, text=text),)), Layout.parse("Ett|t|tt|tL", 2)
    if message is None:
        assert config.forced_layouts(built=built) == {7: Layout.parse(text, 2)}
        return
    with pytest.raises(ConfigError) as caught:
        config.forced_layouts(built=built)
    assert str(caught.value) == f"--dyn-layout-at 7: {message}"


def test_empty_stages_can_be_allowed() -> None:
    """By the flag that the refusal names."""
    forced = (ForcedLayout(iteration=7, text="Et*4|L"),)
    config = DynConfig(layout_at=forced, decide=DecideConfig(allow_empty_stages=True))
    assert config.forced_layouts(built=BUILT)[7].counts == (4, 0)


def test_settings_do_not_change() -> None:
    """Neither the whole nor its parts."""
    config = DynConfig()
    with pytest.raises(FrozenInstanceError):
        config.timeout_seconds = 1.0  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        config.decide.min_gain = 0.5  # type: ignore[misc]
