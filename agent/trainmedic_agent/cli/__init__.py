"""The commands ``agent`` and ``agent-reader``."""
