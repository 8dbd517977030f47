"""Measurements behind the numbers in the docs. Each prints one table with ratios taken within one run on a named machine."""
