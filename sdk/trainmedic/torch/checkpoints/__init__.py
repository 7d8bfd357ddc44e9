"""Checkpoints of a plain PyTorch training on disk."""
