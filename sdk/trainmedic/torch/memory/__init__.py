"""In-memory checkpoints, and their copies on other nodes."""
