"""Slurm through its commands, on a node where an operator of Slurm may use them: ``slurm.*``."""
