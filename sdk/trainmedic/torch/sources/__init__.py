"""Batch sources and their positions."""
