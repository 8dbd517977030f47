"""The `megatron-dyn` command: plans, layouts and records on any machine, with neither torch nor Megatron."""
