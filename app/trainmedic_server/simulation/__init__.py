"""Offline use of playbooks: check, explain, test and replay, by the engine in virtual time."""
