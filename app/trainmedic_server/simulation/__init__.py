"""Offline use of playbooks: checks, explanations and tests."""
