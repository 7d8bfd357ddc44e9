"""The commands that need no server: ``logs check``, ``explain`` and ``schema``, and ``diagnose --dir``."""
