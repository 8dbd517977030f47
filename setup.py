"""Shim for tools that still call setup.py; metadata and tool settings live in pyproject.toml."""

from setuptools import setup

setup()
