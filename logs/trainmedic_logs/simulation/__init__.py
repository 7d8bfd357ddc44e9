"""Offline use of log rules: explanation of files, and tests."""
