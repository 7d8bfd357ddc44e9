"""Interfaces of the engine to external systems, implemented by adapters.

All implementations pass the port's contract suite in ``tests/contract``.
"""
