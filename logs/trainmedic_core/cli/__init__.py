"""Shared parts of all commands: exit codes, tables, flags of settings."""
