"""Settings of ``trainmedic serve``. The agent's are without pydantic, to save 8 MB of memory."""
