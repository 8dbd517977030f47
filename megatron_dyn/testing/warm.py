"""What every rank of a test would do anew and with the same result: done once, in the parent that the ranks fork from.

Loaded by the server of `testing.ranks` alone, so nothing here can change a job outside of tests. Importing it imports Megatron.
"""

import argparse
import functools

from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset
from megatron.training import argument_utils, arguments

# Modules that a rank needs some tenths of a second to import.
import megatron_dyn.host.gpt
import megatron_dyn.installer  # noqa: F401

_Factory = argument_utils.ArgumentGroupFactory
_parse = _Factory._get_field_docstrings


@functools.cache
def _help_texts(config_class: type) -> dict[str, str]:
    # It reads nothing of the factory itself.
    texts: dict[str, str] = _parse(object.__new__(_Factory), config_class)
    return texts


# For the help texts of its flags Megatron parses the source of its config classes, twice at every start.
_Factory._get_field_docstrings = lambda _self, config_class: dict(_help_texts(config_class))
arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))

# Mock data has 100,000 documents; shuffling their samples takes longer than the training of a tiny model.
MockGPTLowLevelDataset.size = 2000
