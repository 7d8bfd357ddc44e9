"""Playbooks and alert maps: reading, checking, compiling and reloading. All errors of a file are reported at once, as
values (``trainmedic_core.problems``).
"""
