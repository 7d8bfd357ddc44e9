"""Shared parts of all commands."""
