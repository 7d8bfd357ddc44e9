"""Interfaces of the engine to external systems, implemented by adapters.

All implementations pass the port's contract suite in ``tests/contract``. The package imports nothing: the node agent
uses parts of it and must stay small.
"""
