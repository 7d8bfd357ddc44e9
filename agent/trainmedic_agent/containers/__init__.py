"""Removal of unused containers, images and build cache: ``disk.prune_containers``."""
