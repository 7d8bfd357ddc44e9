"""Checkpoints, restarts of a loop, the rollback budget, pauses, and the record of what commands have changed."""
