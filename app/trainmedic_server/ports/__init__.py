"""Interfaces of the engine to external systems. Adapters implement them.

Each port has one contract suite in ``tests/contract``, which every implementation passes.

This package imports nothing, because the node agent uses parts of it and must stay small (``docs/decisions.md``).
"""
