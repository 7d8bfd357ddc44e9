"""Playbooks and alert maps. All errors of a file are reported at once, as values."""
