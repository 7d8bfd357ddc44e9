"""Offline use of playbooks."""
