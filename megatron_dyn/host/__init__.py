"""The only part of the plugin that knows Megatron: its releases, its symbols, its data structures.

Everything here may import `megatron`; the stages below (`measure`, `plan`, `migrate`, `rebuild`, `report`) import
nothing of it.
"""
