"""Frozen values and pure functions, with no library but pydantic and msgspec."""
