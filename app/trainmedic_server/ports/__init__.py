"""Interfaces that adapters implement. Each has a contract suite in ``tests/contract``."""
