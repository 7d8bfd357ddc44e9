"""What people write into playbooks and log rules that is more than a value: expressions, templates, patterns.

All of it is bounded in time and size, whoever wrote it and whatever it is tried on.
"""
