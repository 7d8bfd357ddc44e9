"""Frozen values and pure functions: no clock, no input or output, no library but pydantic."""
