"""Commands without a server: ``logs check``, ``explain``, ``schema``, and ``diagnose --dir``."""
