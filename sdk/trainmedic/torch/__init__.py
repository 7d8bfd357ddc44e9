"""Trainmedic in a plain PyTorch training loop."""
