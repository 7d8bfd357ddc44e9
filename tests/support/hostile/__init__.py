"""Hostile users of a node and what they do to its logs, for tests and benchmarks."""
