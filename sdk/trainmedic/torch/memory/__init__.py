"""In-memory checkpoints, and copies on other nodes."""
