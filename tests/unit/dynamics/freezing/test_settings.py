"""FreezeSettings: the three methods, their keys, and what is refused."""

import pytest

from megatron_dyn.config import ConfigError
from megatron_dyn.dynamics.freezing.settings import EmbeddingRule, FreezeSettings, FrozenState, Method


def parse(text, **options):
    return FreezeSettings.parse(text, num_layers=8, **options)


def test_a_schedule_is_the_text_of_an_object():
    settings = parse('{"0-3": [10, -1]}', embedding="never", state="park", cache_gib=0.5)
    assert (settings.method, settings.schedule.frozen(10)) == (Method.SCHEDULE, {0, 1, 2, 3})
    assert (settings.embedding, settings.state, settings.cache_gib) == (EmbeddingRule.NEVER, FrozenState.PARK, 0.5)


def test_methods_have_defaults_and_keys():
    assert parse("autofreeze").autofreeze.percentile == 50.0
    assert parse("autofreeze:percentile=75.5,evaluations=4").autofreeze.evaluations == 4
    egeria = parse("egeria:interval=2,window=3,tolerance=0.1,patience=2,update=7,lr_drop=5").egeria
    assert (egeria.interval, egeria.window, egeria.tolerance, egeria.patience, egeria.update, egeria.lr_drop) == (
        2,
        3,
        0.1,
        2,
        7,
        5,
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("soon", "expected a schedule such as .* autofreeze or egeria, got 'soon': not JSON"),
        ("autofreeze:percentile=101", "autofreeze:percentile: expected 0 to 100, got 101"),
        ("autofreeze:evaluations=1", "autofreeze:evaluations: expected at least 2, got 1"),
        ("autofreeze:evaluations=1.5", "autofreeze: expected percentile=<float>, evaluations=<int>, each once"),
        ("autofreeze:patience=3", "autofreeze: expected percentile"),
        ("autofreeze:percentile=5,percentile=6", "each once, got 'percentile=6'"),
        ("egeria:window=1", "egeria:window: expected at least 2, got 1"),
        ("egeria:tolerance=1", "egeria:tolerance: expected above 0 and below 1"),
        ("egeria:lr_drop=1", "egeria:lr_drop: expected above 1"),
        ("egeria:interval=0", "egeria:interval: expected at least 1"),
        ('{"0": 3, "0": 4}', "expected each range once, got '0' twice"),
        ('{"8": 3}', "layer 8 is unknown"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(text, told):
    with pytest.raises(ConfigError, match=f"^--dyn-freeze.*{told}") as refused:
        parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("cache_gib", [-1.0, float("inf"), float("nan")])
def test_a_cache_has_a_size(cache_gib):
    with pytest.raises(ConfigError, match="^--dyn-freeze-cache-gib"):
        parse("autofreeze", cache_gib=cache_gib)
