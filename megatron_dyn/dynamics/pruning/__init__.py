"""Gradual pruning: `--dyn-prune`. See docs/dynamics/pruning.md."""
