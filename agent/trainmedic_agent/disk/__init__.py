"""Freeing of disk space by the policy's cleaning rules: ``disk.clean``."""
