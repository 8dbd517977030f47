"""The exact algorithm: the fastest slowest stage, proved, and the shortest simulated step near it."""
