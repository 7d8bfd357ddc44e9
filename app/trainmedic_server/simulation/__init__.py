"""Offline use of playbooks: check, test and replay, by the engine in virtual time."""
