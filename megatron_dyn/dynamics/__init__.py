"""The sources of imbalance as features: one module or folder per family, each a ports.Dynamic.

A family brings its flags (`add_flags`) and makes itself from them (`from_args`, None when it is off). Importing this package
imports neither torch nor Megatron: the command line needs the flags only.
"""

from megatron_dyn.dynamics.registry import add_family_flags, families_from_args

__all__ = ["add_family_flags", "families_from_args"]
