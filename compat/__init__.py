"""The plugin against other Megatrons: older supported releases (`release`), and Megatron-LM's own tests (`upstream`).

Started by `make test-compat` and `make test-upstream`, each part in an environment of its own. The lock files beside
this one hold what differs from requirements.lock. Nothing of this is installed with the plugin.
"""
