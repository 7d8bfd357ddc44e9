"""Implementations of ``ports``, named after their technology."""
