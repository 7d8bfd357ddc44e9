"""Removal of unused containers, images and build cache of a container engine: ``disk.prune_containers``."""
