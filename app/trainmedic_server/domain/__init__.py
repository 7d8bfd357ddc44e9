"""Frozen values and pure functions: no clock, no I/O, no library but pydantic and msgspec."""
