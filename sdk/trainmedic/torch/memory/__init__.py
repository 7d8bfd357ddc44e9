"""Checkpoints in the host's memory, and copies of them in the memory of other nodes."""
