"""Interfaces of the engine to external systems, implemented by adapters.

All implementations of a port pass its contract suite in ``tests/contract``. This package imports nothing: the node
agent uses parts of it and must stay small (``docs/decisions.md``).
"""
