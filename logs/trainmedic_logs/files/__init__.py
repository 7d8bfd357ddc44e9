"""Folders of logs and dumps, read within limits."""
