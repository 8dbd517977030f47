"""The command's refusals are those of the plugin: whoever handles a ConfigError handles them."""

from megatron_dyn.cli.errors import InputError, with_own_flags
from megatron_dyn.config import ConfigError


def test_it_is_a_config_error():
    assert issubclass(InputError, ConfigError)


def test_flags_of_a_run_get_their_names_here():
    told = with_own_flags("gain below --dyn-min-gain under --dyn-stage-memory-gib 2")
    assert told == "gain below --min-gain under --memory-gib 2"
