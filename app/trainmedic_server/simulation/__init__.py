"""Tries playbooks out without a server: checks them, explains what an alert would do, and runs their tests."""
