"""Freeing of disk space by the policy's cleaning rules: the action ``disk.clean``."""
