"""Trying playbooks out without a server: explain what an alert would do, and run playbooks' tests."""
