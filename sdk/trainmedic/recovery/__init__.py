"""Checkpoints, restarts of loops, the rollback budget, pauses, and changes by commands."""
