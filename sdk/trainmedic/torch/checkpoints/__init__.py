"""Checkpoints of a plain PyTorch training on the disk: writing, keeping, loading and comparing them."""
