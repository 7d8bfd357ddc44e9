"""Expressions, templates and patterns of playbooks and log rules, bounded in time and size."""
