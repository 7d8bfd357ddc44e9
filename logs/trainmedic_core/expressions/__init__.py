"""Expressions, templates and patterns in playbooks and log rules, all bounded in time and size."""
