"""Expressions, templates and patterns, bounded in time and size."""
