"""Checkpoints, restarts of a loop, the rollback budget, pauses, and the record of changes by commands."""
