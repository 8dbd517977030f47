"""What tests of the plugin, and of code built on it, start from: ranks, tiny models, recorded steps.

Shipped with the package; nothing outside of tests and examples may import it.
"""
